// Attention of few rows over tokens whose values are not projected: what a launch computes, and how
// it is cut. A row is one (head, query) of a sample; all rows of a sample look at the same tokens.
//
// A head's output is W_v (sum of p_t x_t) + b_v: u = sum of p_t x_t is computed over the tokens
// themselves, and one small product a head follows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace frx {

constexpr int kTokenRows = 16;       // H * Tq at most: the rows of one product
constexpr int kTokenChunk = 16;      // keys that a block works at together
constexpr int kTokenWarps = 8;       // of a block of the forward
constexpr int kTokenColumns = 1024;  // Dv and Hkv * D at most
constexpr int kTokenMostSplits = 128;
constexpr int kTokenMostPairs = 64;  // of a head's dims

// Without bias, dropout and masks that tell rows apart: lengths, key_keep and causality are read.
struct TokenAttentionParams {
  AttentionSizes sizes;
  ScoreModifiers scores;
  DType dtype;         // kFloat16 or kBFloat16
  HeadsView q;         // [B, Tq, H, D]
  HeadsView k;         // [B, Tk, Hkv, D]
  const void* x;       // [B, Tk, Dv] contiguous
  int32_t width;       // Dv
  int32_t num_splits;  // blocks that share a sample's keys

  // Forward
  const void* w_v;  // [Hkv*D, Dv] contiguous
  const void* b_v;  // [Hkv*D] or null
  void* o;          // [B, Tq, H, D] contiguous
  float* lse;       // [B, H, Tq]
  void* u;          // [H, B, Tq, Dv] and what rounding took from it, or null
  void* u_rest;
  float* part_u;      // [num_splits, B, H * Tq, Dv]: weighted by exp(score - maximum)
  float2* part_rows;  // [num_splits, B, H * Tq]: that maximum, in score units, and sum of weights

  // Backward
  const void* du;     // [H, B, Tq, Dv] contiguous, as is u
  const float* dlse;  // [B, H, Tq] or null
  float* part_dq;     // [num_splits, B, H * Tq, D], or null: dq is not wanted
  void* dq;           // [B, Tq, H, D] contiguous
  void* dk;           // [B, Tk, Hkv, D] contiguous, or null: not wanted
  void* dx;           // [B, Tk, Dv], likewise

  // dk leaves as the gradient of the keys before this rotation, whose angles all heads share: pairs
  // are interleaved, or halves of a whole head with one axis.
  RotationParams k_rotation;
  uint64_t k_turns[kTokenMostPairs];  // of each pair of an axis, a position, in units of 2^-64
};

// A block takes a multiprocessor for itself, and has two chunks or all there are: with fewer its
// part of u would be larger than values of the tokens' width.
inline int token_splits(int64_t batch, int num_keys, int num_sms) {
  const int64_t chunks = (int64_t{num_keys} + kTokenChunk - 1) / kTokenChunk;
  int64_t splits = num_sms / (batch > 0 ? batch : 1);
  if (splits > chunks / 2) splits = chunks / 2;
  if (splits > kTokenMostSplits) splits = kTokenMostSplits;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

void token_attention_bf16(const TokenAttentionParams& p, cudaStream_t stream);
void token_attention_fp16(const TokenAttentionParams& p, cudaStream_t stream);
void token_attention_backward_bf16(const TokenAttentionParams& p, cudaStream_t stream);
void token_attention_backward_fp16(const TokenAttentionParams& p, cudaStream_t stream);

}  // namespace frx
