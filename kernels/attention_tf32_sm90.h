// Attention backward for Hopper (sm_90a) in TF32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace frx {

// Why run_attention_backward_tf32_sm90 cannot take the problem; null when it can. Needs no GPU.
const char* attention_backward_tf32_sm90_obstacle(const AttentionBackwardParams& params);

// Whether it can, and is worth the copies that it makes.
bool attention_backward_tf32_sm90_pays(const AttentionBackwardParams& params);

// Transposed copies that the kernels read, parts of the workspace p.copies; null: not needed.
struct Tf32BackwardCopies {
  float *q, *dout, *k;
  int64_t floats;  // of all
};
Tf32BackwardCopies tf32_backward_copies(const AttentionBackwardParams& params);

// dq, dk and dv, as far as wanted, from q, k, v, dout, lse and delta; the same bits every time.
void run_attention_backward_tf32_sm90(const AttentionBackwardParams& params, cudaStream_t stream);

// One translation unit a padded head dim. `follows_copies`: the kernel before made them.
void attention_backward_keys_tf32_sm90_d32(const AttentionBackwardParams& params,
                                           bool follows_copies, cudaStream_t stream);
void attention_backward_keys_tf32_sm90_d64(const AttentionBackwardParams& params,
                                           bool follows_copies, cudaStream_t stream);
void attention_backward_keys_tf32_sm90_d128(const AttentionBackwardParams& params,
                                            bool follows_copies, cudaStream_t stream);
void attention_backward_queries_tf32_sm90_d128(const AttentionBackwardParams& params,
                                               bool follows_copies, cudaStream_t stream);
void attention_backward_queries_tf32_sm90_d32(const AttentionBackwardParams& params,
                                              bool follows_copies, cudaStream_t stream);
void attention_backward_queries_tf32_sm90_d64(const AttentionBackwardParams& params,
                                              bool follows_copies, cudaStream_t stream);

}  // namespace frx
