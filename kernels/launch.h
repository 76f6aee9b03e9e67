// The ways to launch a kernel: shared-memory limit, launch, error check.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_check.h"

namespace frx {

// As much of the L1 cache as can be becomes shared memory, so that blocks of a further kernel fit
// beside this one's.
template <class Params>
void prefer_shared_memory(void (*kernel)(Params), const char* name) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             name);
}

template <class Params>
void allow_smem(void (*kernel)(Params), const char* name, size_t smem_bytes) {
  if (smem_bytes <= 48 * 1024) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(smem_bytes)),
             name);
}

template <class Params>
void launch(void (*kernel)(Params), const char* name, int64_t blocks, int threads,
            size_t smem_bytes, cudaStream_t stream, const Params& params) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + name + " needs " +
                             std::to_string(blocks) + " blocks, more than a grid holds; " +
                             "split the batch");
  }
  allow_smem(kernel, name, smem_bytes);
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), name);
}

}  // namespace frx
