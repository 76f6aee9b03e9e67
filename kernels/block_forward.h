// The forward of small problems, one translation unit a dtype so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "block_params.h"

namespace frx {

void block_forward_bf16(const BlockForwardParams& p, cudaStream_t stream);
void block_forward_fp16(const BlockForwardParams& p, cudaStream_t stream);
void block_forward_tf32(const BlockForwardParams& p, cudaStream_t stream);
void block_forward_fp32(const BlockForwardParams& p, cudaStream_t stream);

}  // namespace frx
