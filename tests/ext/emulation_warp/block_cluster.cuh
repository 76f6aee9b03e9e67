// A cluster of one block.
#pragma once

#include <cuda_runtime.h>

namespace frx {

inline void sync_cluster() {
  constexpr int kBarrier = -1;  // none that has a number
  hopper::meet(hopper::block().named[kBarrier], static_cast<int>(hopper::block().fibers.size()));
}
inline float2 load_from_peer(const float2* place, int) { return *place; }
inline void prefetch_to_l2(const void*) {}

}  // namespace frx
