// Device side of block_rotation.h: what a thread reads of a rotation.
#pragma once

#include "block_rotation.h"
#include "ptx.cuh"

namespace frx {

// Turns a position of a pair of the head that lies on the axis; unused where tables are given.
// Lanes ask for different ones, which the constant bank gives one after the other: read as if they
// lay anywhere, they come side by side.
__device__ __forceinline__ uint64_t load_turns(const BlockRotation& r, int pair, int axis) {
  const int i = pair - axis * static_cast<int>(r.axis_pairs.value);
  return *reinterpret_cast<const uint64_t*>(settled(reinterpret_cast<const char*>(r.turns + i)));
}

}  // namespace frx
