// The current GPU and torch's current stream, without linking libtorch_cuda.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "plan.h"

namespace frx {

// Attributes of the current device, asked once a device.
Gpu current_gpu();

cudaStream_t current_stream(int32_t device_index);

}  // namespace frx
