// Stands in for the CUDA toolkit's header where Hopper kernels are compiled for the host.
#pragma once

#include "hopper.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH_FEAT_SM90_ALL

#define threadIdx (hopper::block().thread)
#define blockIdx (hopper::block().block)
#define gridDim (hopper::block().grid_dim)

using cudaStream_t = struct CUstream_st*;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline void __syncthreads() {
  hopper::show_copies();
  hopper::meet(hopper::block().named[0], static_cast<int>(hopper::block().fibers.size()));
}
inline void __syncwarp() {
  hopper::show_copies();
  hopper::sync_warp();
}

inline float __ldcg(const float* address) {
  return hopper::is_unfinished(address) ? std::numeric_limits<float>::quiet_NaN() : *address;
}
inline float4 __ldcg(const float4* address) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return hopper::is_unfinished(address) ? float4{nan, nan, nan, nan} : *address;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return static_cast<T>(hopper::shuffle(static_cast<uint32_t>(value), lane));
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
  return hopper::shuffle(value, hopper::block().running % hopper::kWarp ^ mask);
}
inline int __shfl_xor_sync(unsigned all, int value, int mask) {
  return static_cast<int>(__shfl_xor_sync(all, static_cast<uint32_t>(value), mask));
}
inline float __shfl_xor_sync(unsigned all, float value, int mask) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = __shfl_xor_sync(all, bits, mask);
  std::memcpy(&value, &bits, 4);
  return value;
}

// Named by headers that kernels share, not called on the emulator.
int __any_sync(unsigned, int);
size_t __cvta_generic_to_shared(const void*);
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
