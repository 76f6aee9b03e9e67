// The ways to launch a kernel: shared-memory limit, launch, error check.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_check.h"

namespace frx {

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

// For kernels whose blocks wait for each other. The driver refuses a grid that cannot be resident
// as a whole, so such a kernel fails here rather than hang.
template <class Params>
void launch_cooperative(void (*kernel)(Params), const char* name, int blocks, int threads,
                        size_t smem_bytes, cudaStream_t stream, const Params& params) {
  allow_smem(kernel, name, smem_bytes);
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), arguments, smem_bytes,
                                         stream),
             name);
}

}  // namespace frx
