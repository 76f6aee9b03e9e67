// The rotation of a small block's heads, with what the host works out for the kernels: fp64 powers
// and divisions would be most of such a kernel's time.
#pragma once

#include <cstdint>

#include "divisor.h"
#include "params.h"
#include "turns.cuh"

namespace frx {

constexpr int kBlockLargestHeadDim = 128;

struct BlockRotation : RotationParams {
  Divisor axis_pairs;  // pairs an axis
  // Turns a position of each pair of an axis, in units of 2^-64; unused where tables are given.
  uint64_t turns[kBlockLargestHeadDim / 2];
};

inline void plan_rotation(BlockRotation& r) {
  if (r.rotary_dim == 0) return;
  const int pairs = r.rotary_dim / r.axes / 2;
  r.axis_pairs = make_divisor(pairs);
  if (r.cos != nullptr) return;
  for (int i = 0; i < pairs; ++i) {
    r.turns[i] = turns_a_position(inverse_frequency(i, 2 * pairs, r.log2_base));
  }
}

}  // namespace frx
