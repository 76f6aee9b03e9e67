// A launch that overlaps the end of the kernel before it in the stream (programmatic dependent
// launch, Hopper and newer; a plain launch elsewhere).
#pragma once

#include "kernel_state.h"
#include "launch.h"

namespace frx {

// Device side. Until it has waited, a chained kernel may read only what was complete when the
// kernel that precedes it let it start. Whoever reads what that one writes, or stores anything,
// waits. docs/design/hopper.md has the rules for chains of more than two.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may start where this kernel leaves room.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class Params>
bool waits_for_previous_kernel(void (*kernel)(Params), const char* name) {
  return state_of_kernel(kernel).waits_for_previous_kernel(name);
}

// The first kernel of a call waits for whatever precedes it in the stream. cluster: how many
// neighbouring blocks share a cluster; more than one only where waits_for_previous_kernel().
template <class Params>
void launch_chained(void (*kernel)(Params), const char* name, int64_t blocks, int threads,
                    size_t smem_bytes, cudaStream_t stream, const Params& params, int cluster = 1) {
  KernelState& state = state_of_kernel(kernel);
  if (blocks == 0 || blocks > INT32_MAX || !state.waits_for_previous_kernel(name)) {
    return launch(kernel, name, blocks, threads, smem_bytes, stream, params);
  }
  state.allow_smem(name, smem_bytes);
  state.prefer_shared_memory(name);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace frx
