// The kernels' launch(), on the emulator.
#pragma once

#include <cuda_runtime.h>

namespace frx {

template <class Params>
void launch(void (*kernel)(Params), const char*, int64_t blocks, int threads, size_t smem_bytes,
            cudaStream_t, const Params& params, int cluster = 1) {
  hopper::run_grid(blocks, threads, smem_bytes, [&] { kernel(params); }, cluster);
}

}  // namespace frx
