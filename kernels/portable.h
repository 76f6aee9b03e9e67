// The portable attention kernels, one translation unit a dtype so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace frx {

void attention_forward_bf16(const AttentionForwardParams& p, cudaStream_t stream);
void attention_forward_fp16(const AttentionForwardParams& p, cudaStream_t stream);
void attention_forward_tf32(const AttentionForwardParams& p, cudaStream_t stream);
void attention_forward_fp32(const AttentionForwardParams& p, cudaStream_t stream);

void attention_row_sums_bf16(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_row_sums_fp16(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_row_sums_tf32(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_row_sums_fp32(const AttentionBackwardParams& p, cudaStream_t stream);

void attention_backward_bf16(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_backward_fp16(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_backward_tf32(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_backward_fp32(const AttentionBackwardParams& p, cudaStream_t stream);

}  // namespace frx
