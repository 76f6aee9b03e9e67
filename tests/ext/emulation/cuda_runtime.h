// Stands in for the CUDA toolkit's header where kernels are compiled for the host; see emulator.h.
#pragma once

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulation::current().thread)
#define blockIdx (emulation::current().block)
#define blockDim (emulation::current().block_dim)
#define gridDim (emulation::current().grid_dim)

using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess, cudaDevAttrMaxSharedMemoryPerBlockOptin };

inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = emulation::gpu().max_smem_bytes;
  return cudaSuccess;
}

inline void __syncthreads() { emulation::sync_block(); }

inline float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  return emulation::shuffle_xor(value, lane_mask);
}

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
