// Chained launches on the emulator. It runs one kernel after another, but shows what the one before
// wrote only to threads that have waited (hopper::Previous).
#pragma once

#include "device.h"
#include "launch.h"

namespace frx {

inline void wait_for_previous_kernel() { hopper::self().has_waited = true; }
inline void let_next_kernel_start() {
  if (hopper::says_so_last && !hopper::self().has_waited) {
    throw std::runtime_error("a thread lets the next kernel start before it has waited");
  }
}

template <class Params>
bool waits_for_previous_kernel(void (*)(Params), const char*) {
  return hopper::has_clusters();
}

template <class Params>
void launch_chained(void (*kernel)(Params), const char* name, int64_t blocks, int threads,
                    size_t smem_bytes, cudaStream_t stream, const Params& params, int cluster = 1) {
  if (blocks == 0) return;  // no launch takes place
  hopper::previous().is_chained = true;
  launch(kernel, name, blocks, threads, smem_bytes, stream, params, cluster);
  hopper::previous() = {};
}

}  // namespace frx
