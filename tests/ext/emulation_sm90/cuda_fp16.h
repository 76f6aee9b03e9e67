#pragma once

struct __half {
  _Float16 value;
};

inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }

struct __half2 {
  __half x, y;
};

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
