// A small block's backward, one translation unit a dtype so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "block_backward_params.h"

namespace frx {

void block_backward_bf16(const BlockBackwardParams& p, cudaStream_t stream);
void block_backward_fp16(const BlockBackwardParams& p, cudaStream_t stream);
void block_backward_tf32(const BlockBackwardParams& p, cudaStream_t stream);
void block_backward_fp32(const BlockBackwardParams& p, cudaStream_t stream);

}  // namespace frx
