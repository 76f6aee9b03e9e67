// Blocks that share the work on one tile: a cluster (Hopper and newer), whose blocks run at the
// same time and read each other's shared memory. Elsewhere every block has a tile of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace frx {

// Of all threads of the cluster. What they wrote to shared memory before can be read after.
__device__ __forceinline__ void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Not the aligned forms: threads of a warp may come from different rows of a loop.
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// What lies at this place of shared memory in the cluster's block `rank`. No block may end before
// the last such load: a further sync_cluster() follows.
__device__ __forceinline__ float2 load_from_peer(const float2* place, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(place));
  uint32_t peer;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(peer)
               : "memory");
  return value;
#else
  return *place;
#endif
}

// Brings the 128 bytes around an address to L2, and waits for nothing.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace frx
