// Chained launches on the emulator, which runs one kernel after another.
#pragma once

#include "launch.h"

namespace frx {

inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

template <class Params>
void launch_chained(void (*kernel)(Params), const char* name, int64_t blocks, int threads,
                    size_t smem_bytes, cudaStream_t stream, const Params& params) {
  launch(kernel, name, blocks, threads, smem_bytes, stream, params);
}

}  // namespace frx
