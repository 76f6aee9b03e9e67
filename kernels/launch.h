// The ways to launch a kernel: shared-memory limit, launch, error check.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_check.h"
#include "kernel_state.h"

namespace frx {

template <class Params>
KernelState& state_of_kernel(void (*kernel)(Params)) {
  return state_of_kernel(reinterpret_cast<const void*>(kernel));
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
  state_of_kernel(kernel).allow_smem(name, smem_bytes);
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), name);
}

}  // namespace frx
