// Division by a number that the host knows, as a multiplication.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace frx {

// quotient() is exact for every dividend in [0, 2^31). After Granlund and Montgomery, "Division by
// Invariant Integers using Multiplication" (PLDI 1994): with shift = ceil(log2 divisor), the factor
// ceil(2^(32 + shift) / divisor) needs 33 bits, the highest of which is the addition below.
struct Divisor {
  uint32_t value;
  uint32_t factor;  // its lower 32 bits
  uint32_t shift;
};

inline Divisor make_divisor(int32_t value) {
  const uint32_t divisor = value < 1 ? 1 : static_cast<uint32_t>(value);
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t beyond = ((uint64_t{1} << shift) - divisor) << 32;
  return {divisor, static_cast<uint32_t>(beyond / divisor + 1), shift};
}

FRX_HOST_DEVICE int32_t quotient(int32_t dividend, const Divisor& d) {
#ifdef __CUDA_ARCH__
  const uint32_t high = __umulhi(static_cast<uint32_t>(dividend), d.factor);
#else
  const uint32_t high = static_cast<uint32_t>(
      (static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * d.factor) >> 32);
#endif
  return static_cast<int32_t>((high + static_cast<uint32_t>(dividend)) >> d.shift);
}

}  // namespace frx
