// Chained launches on the emulator, which runs one kernel after another and knows no clusters.
#pragma once

#include "device.h"
#include "launch.h"

namespace frx {

inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

template <class Params>
bool waits_for_previous_kernel(void (*)(Params), const char*) {
  return false;
}

template <class Params>
void launch_chained(void (*kernel)(Params), const char* name, int64_t blocks, int threads,
                    size_t smem_bytes, cudaStream_t stream, const Params& params, int = 1) {
  launch(kernel, name, blocks, threads, smem_bytes, stream, params);
}

}  // namespace frx
