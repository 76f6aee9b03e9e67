// Softmax attention for Hopper (sm_90a): warp-specialised kernels for bf16 and fp16, forward also
// for TF32.
#pragma once

#include <cuda_runtime.h>

#include "key_pieces.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

// Query and key rows of one block's tile, and how many such blocks a multiprocessor runs.
struct Sm90ForwardTile {
  int queries;
  int keys;
  int blocks_per_sm;
};

// Head dims are padded to the next of 32, 64, 128, 256 by the copy engine's zero fill. Few queries
// leave the tensor cores idle either way: small tiles keep more copies in flight. TF32 stops at 128
// dims.
constexpr Sm90ForwardTile sm90_forward_tile(DType dtype, int head_dim, int num_queries) {
  if (dtype == DType::kTF32) {
    return head_dim <= 64 ? Sm90ForwardTile{192, 96, 1} : Sm90ForwardTile{128, 64, 1};
  }
  if (head_dim <= 64) {
    return num_queries <= 64 ? Sm90ForwardTile{64, 128, 2} : Sm90ForwardTile{192, 128, 1};
  }
  if (head_dim <= 128) {
    return num_queries <= 64 ? Sm90ForwardTile{64, 64, 2} : Sm90ForwardTile{128, 176, 1};
  }
  return {128, 80, 1};
}

// Why run_attention_forward_sm90 cannot take the problem; null when it can. Needs no GPU.
const char* attention_forward_sm90_obstacle(const AttentionForwardParams& params);

inline bool attention_forward_sm90_supports(const AttentionForwardParams& params) {
  return attention_forward_sm90_obstacle(params) == nullptr;
}

// Whether the kernel is worth what it takes before it: in TF32 a pass over V.
bool attention_forward_sm90_pays(const AttentionForwardParams& params);

// Over how many blocks to split the keys of a query tile, so that whole waves fill the GPU.
int attention_forward_sm90_splits(const AttentionSizes& sizes, DType dtype, int num_sms);

// With num_splits > 1 writes partial_o and partial_lse, for the caller to combine, else o and lse.
void run_attention_forward_sm90(const AttentionForwardParams& params, cudaStream_t stream);

// One translation unit a padded head dim.
void attention_forward_sm90_d32(const AttentionForwardParams& params, cudaStream_t stream);
void attention_forward_sm90_d64(const AttentionForwardParams& params, cudaStream_t stream);
void attention_forward_sm90_d128(const AttentionForwardParams& params, cudaStream_t stream);
void attention_forward_sm90_d256(const AttentionForwardParams& params, cudaStream_t stream);

// The same in TF32, from transposed values.
void attention_forward_tf32_sm90_d32(const AttentionForwardParams& params, cudaStream_t stream);
void attention_forward_tf32_sm90_d64(const AttentionForwardParams& params, cudaStream_t stream);
void attention_forward_tf32_sm90_d128(const AttentionForwardParams& params, cudaStream_t stream);

// ---- backward ---------------------------------------------------------------------------------

// Why run_attention_backward_sm90 cannot take the problem; null when it can. Needs no GPU.
const char* attention_backward_sm90_obstacle(const AttentionBackwardParams& params);

inline bool attention_backward_sm90_supports(const AttentionBackwardParams& params) {
  return attention_backward_sm90_obstacle(params) == nullptr;
}

// Whether the kernels can take a gradient back through the rotation, or a kernel of its own must.
// Angles in fixed point need a frequency below one turn where positions have fractions; shared
// memory holds positions on three axes.
inline bool backward_sm90_turns(const RotationParams& r) {
  if (r.cos != nullptr) return true;
  const bool has_fractions =
      r.position_type == PositionType::kFloat32 || r.position_type == PositionType::kFloat64;
  return r.axes <= 3 && (!has_fractions || r.log2_base >= 0);
}

// The same for keys, which a block takes through shared memory when it has walked over the queries:
// after a few of them, as in decoding, that takes longer than a kernel of its own.
inline bool backward_sm90_turns_keys(const AttentionSizes& s, const RotationParams& r) {
  constexpr int64_t kLeastQueries = 512;
  const int64_t queries = static_cast<int64_t>(s.num_queries) * (s.num_heads / s.num_kv_heads);
  return backward_sm90_turns(r) && queries >= kLeastQueries;
}

// Which kernels make dq, dk and dv, and what they need in between.
struct Sm90BackwardPlan {
  bool dq_with_dkv;
  int num_splits;
  int64_t dq_parts_floats;  // 0: no workspace
  KeyCut key_cut;
  int64_t dkv_parts_floats;  // likewise
  WindowPlan windows;
  int64_t window_bytes;
};

// Reads sizes, causality, which gradients are wanted, and `deterministic`.
Sm90BackwardPlan plan_attention_backward_sm90(const AttentionBackwardParams& params, int num_sms);

// dq, dk and dv, as far as wanted, from q, k, v, dout, lse and delta. With dq_with_dkv dq_parts are
// zeros before.
void run_attention_backward_sm90(const AttentionBackwardParams& params, cudaStream_t stream);

// One translation unit a padded head dim; the sum of parts is a further one.
void attention_backward_sm90_d32(const AttentionBackwardParams& params, cudaStream_t stream);
void attention_backward_sm90_d64(const AttentionBackwardParams& params, cudaStream_t stream);
void attention_backward_sm90_d128(const AttentionBackwardParams& params, cudaStream_t stream);
void attention_backward_sm90_d256(const AttentionBackwardParams& params, cudaStream_t stream);
void attention_backward_sm90_windows_d256(const AttentionBackwardParams& params,
                                          cudaStream_t stream);
void attention_backward_sm90_sum(const AttentionBackwardParams& params, const CutKeys& cut,
                                 cudaStream_t stream);

}  // namespace frx
