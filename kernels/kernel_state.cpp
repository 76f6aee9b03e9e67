#include "kernel_state.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda_check.h"
#include "device.h"

namespace frx {

void KernelState::allow_smem(const char* name, size_t bytes) {
  if (bytes <= smem_bytes_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes <= smem_bytes_.load(std::memory_order_relaxed)) return;
  check_cuda(cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             name);
  smem_bytes_.store(bytes, std::memory_order_release);
}

void KernelState::prefer_shared_memory(const char* name) {
  if (prefers_smem_.load(std::memory_order_acquire)) return;
  check_cuda(cudaFuncSetAttribute(kernel_, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             name);
  prefers_smem_.store(true, std::memory_order_release);
}

bool KernelState::waits_for_previous_kernel(const char* name) {
  Answer answer = waits_.load(std::memory_order_relaxed);
  if (answer == kUnknown) {
    constexpr int kFirstDriver = 12030;  // older ones do not capture such a launch in a graph
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver), name);
    answer = kNo;
    if (current_gpu().capability >= 90 && driver >= kFirstDriver) {
      cudaFuncAttributes attributes;
      check_cuda(cudaFuncGetAttributes(&attributes, kernel_), name);
      if (attributes.ptxVersion >= 90) answer = kYes;
    }
    waits_.store(answer, std::memory_order_relaxed);
  }
  return answer == kYes;
}

KernelState& state_of_kernel(const void* kernel) {
  using States = std::map<std::pair<int, const void*>, KernelState>;  // by device, never moved
  static std::mutex mutex;
  static States& states = *new States;  // outlives threads that still launch when the process ends
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  return states.try_emplace({device, kernel}, kernel).first->second;
}

}  // namespace frx
