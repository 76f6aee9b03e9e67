#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};  // ties to even
}

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
