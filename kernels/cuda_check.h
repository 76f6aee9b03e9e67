// A failed CUDA call becomes an exception that names what failed; torch shows it as a RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace frx {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

}  // namespace frx
