// What the kernels offer to bindings.cpp: every entry point, nothing else.
#pragma once

#include <cuda_runtime.h>

#include "block_backward_params.h"
#include "block_params.h"
#include "params.h"

namespace frx {

void run_attention_forward(const AttentionForwardParams& params, cudaStream_t stream);
void run_attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);
void run_block_forward(const BlockForwardParams& params, cudaStream_t stream);
void run_block_backward(const BlockBackwardParams& params, cudaStream_t stream);
void run_norm_rope(const NormRopeParams& params, cudaStream_t stream);
void run_norm_rope_backward(const NormRopeParams& params, cudaStream_t stream);
// Up to kMaxTurnedBack without a norm, behind the attention's backward: in one launch if possible.
void run_rope_backward(const NormRopeParams* sides, int count, cudaStream_t stream);

}  // namespace frx
