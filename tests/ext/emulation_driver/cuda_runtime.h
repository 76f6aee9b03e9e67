// The questions that kernel_state.cpp asks the driver, of GPUs that are not there: what they
// answer, and which were asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess, cudaErrorInvalidValue };
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaSharedmemCarveoutMaxShared
};
struct cudaFuncAttributes {
  int ptxVersion;
};

namespace driver {

inline int device = 0, version = 0, capability = 0;
inline std::vector<std::string> asked;
// Of kernels, by the addresses that stand for them: the PTX version that each was compiled to.
inline std::vector<int> ptx_versions;

}  // namespace driver

inline const char* cudaGetErrorString(cudaError_t) { return "refused"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = driver::device;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  driver::asked.push_back("version");
  *version = driver::version;
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  driver::asked.push_back("attributes");
  attributes->ptxVersion = driver::ptx_versions.at(reinterpret_cast<uintptr_t>(kernel));
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, int which, int value) {
  const bool is_smem = which == cudaFuncAttributeMaxDynamicSharedMemorySize;
  driver::asked.push_back(is_smem ? "smem " + std::to_string(value) : "carveout");
  return is_smem && value > 227 * 1024 ? cudaErrorInvalidValue : cudaSuccess;
}
