// Plain-data descriptions of one launch. No torch here: bindings.cpp fills these in, kernels read
// them.
//
// Symbols: B batch, Tq/Tk query and key length, H/Hkv query and key heads, D head dim, R rotary
// dims. Strides count elements and are 64-bit; a stride of 0 broadcasts.
#pragma once

#include <cstdint>

namespace frx {

// How elements are stored and multiplied. kTF32 and kFloat32 both store fp32: the first multiplies
// once in TF32, the second four times (heads and tails) to keep fp32 accuracy.
enum class DType : int { kFloat32 = 0, kTF32 = 1, kFloat16 = 2, kBFloat16 = 3 };

// [B, T, H, D] with D contiguous.
struct HeadsView {
  void* data;
  int64_t batch_stride;
  int64_t token_stride;
  int64_t head_stride;
};

// Anything broadcast over the score matrix [B, H, Tq, Tk]; data == nullptr means absent.
struct ScoresView {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t query_stride;
  int64_t key_stride;
};

enum class PositionType : int { kImplicit = 0, kInt32 = 1, kInt64 = 2, kFloat32 = 3, kFloat64 = 4 };

// Which dims of a head rotate, and by which angles.
struct RotationParams {
  int32_t rotary_dim;  // R; 0 rotates nothing
  int32_t axes;
  bool interleaved;
  bool full_width;
  double log2_base;
  PositionType position_type;
  const void* positions;          // [B|1, T, axes]
  int64_t position_batch_stride;  // 0 when shared
  const float *cos, *sin;         // tables; null = angles from positions
  int64_t table_batch_stride, table_head_stride, table_token_stride;
};

struct AttentionSizes {
  int64_t batch;
  int32_t num_queries;   // Tq
  int32_t num_keys;      // Tk
  int32_t num_heads;     // H
  int32_t num_kv_heads;  // Hkv, divides H
  int32_t head_dim;      // D, multiple of 8, at most 256
};

// What removes or reweighs scores. Shared by forward and backward.
struct ScoreModifiers {
  ScoresView bias;            // added to the scores
  DType bias_dtype;           // kFloat32, kFloat16 or kBFloat16
  ScoresView keep_mask;       // bool, true = attend
  const bool* key_keep;       // [B, Tk] contiguous, true = the key exists; may be null
  const int32_t* kv_lengths;  // [B], keys at and beyond it do not exist; may be null
  bool is_causal;             // query i sees key j when j <= i + length - Tq
  float scale;                // multiplies q k^T

  // Dropout on the weights. keep_threshold counts kept 16-bit draws out of 65536.
  const int64_t* seed;  // [1] on the device; null without dropout
  uint32_t keep_threshold;
  float keep_scale;  // 1 / (1 - p), or 0 when p == 1
};

// Whether more than causality and lengths decides over scores.
inline bool is_modified(const ScoreModifiers& m) {
  return m.bias.data != nullptr || m.keep_mask.data != nullptr || m.key_keep != nullptr;
}

struct AttentionForwardParams {
  AttentionSizes sizes;
  ScoreModifiers scores;
  DType dtype;
  HeadsView q;       // [B, Tq, H, D]
  HeadsView k;       // [B, Tk, Hkv, D]
  HeadsView v;       // [B, Tk, Hkv, D]
  HeadsView o;       // [B, Tq, H, D]
  HeadsView o_rest;  // like o, half types only: what rounding took from it; data null: not wanted
  float* lse;        // [B, H, Tq], natural log; -inf for a row without keys

  bool use_sm90;         // the Hopper kernel instead of the portable one (see plan.h)
  bool has_transposed;   // v_transposed is written already, else it is workspace
  int32_t tile_queries;  // query rows a block of the portable kernel: 64 or 128
  float* v_transposed;   // for Hopper's TF32 kernel (see transpose_heads_sm90.h), or null

  // Keys split over blocks: partial results that a second kernel combines. Unused when num_splits
  // == 1.
  int32_t num_splits;
  float* partial_o;    // [num_splits, B, H, Tq, D]
  float* partial_lse;  // [num_splits, B, H, Tq]
};

// Which of the Hopper backward's blocks of keys are cut along their queries (see key_pieces.h).
struct KeyCut {
  int32_t first_block;  // this one and all after it
  int32_t pieces;       // of each; 1: none is cut
};

// Blocks of keys laid end to end along their tiles of queries, and cut wherever a share ends (see
// key_pieces.h).
struct KeyShares {
  int32_t tiles;   // of a block
  int32_t stride;  // from its first one to the next block's
  int32_t share;   // of a piece, at most
};

// How a window's work is cut: that of its blocks of keys, of which the first ones are whole, and
// that of the blocks that share a query's keys.
struct WindowCut {
  int32_t whole_blocks;
  KeyShares shares;     // of the others
  int32_t first_split;  // tiles of keys of the first one; 0: of each the same
};

struct WindowPlan {
  int32_t blocks;           // of keys, in a window; 0: there are no windows
  WindowCut cut, last_cut;  // of every window but the last, and of that
};

// Score gradients of some blocks of keys at a time (see gradient_windows.h).
struct GradientWindows : WindowPlan {
  void* gradients;
};

struct AttentionBackwardParams {
  AttentionSizes sizes;
  ScoreModifiers scores;
  DType dtype;
  HeadsView q, k, v;    // as in the forward
  HeadsView o, dout;    // [B, Tq, H, D]
  HeadsView o_rest;     // as in the forward; data null: not kept
  const float* lse;     // [B, H, Tq]
  const float* dlse;    // [B, H, Tq] or null
  float* delta;         // [B, H, Tq] workspace: sum over the keys of weight * dweight, less dlse
  float* weight_scale;  // [B, H, Tq] workspace: makes recomputed weights sum to 1; null: not used
  HeadsView dq;         // [B, Tq, H, D]; data == nullptr: not wanted
  HeadsView dk, dv;     // [B, Tk, Hkv, D]; data == nullptr: not wanted
  ScoresView dbias;     // the bias's own sizes, contiguous; data == nullptr: not wanted

  // Hopper only: dq and dk leave as gradients of the heads before this rotation.
  RotationParams q_rotation, k_rotation;

  bool deterministic;  // the same bits every time: no atomic additions

  bool use_sm90;  // the Hopper kernels for dq, dk and dv instead of the portable ones
  float* copies;  // their workspace in TF32 (see attention_tf32_sm90.h), or null

  // Hopper only. Either the kernel of dk and dv also adds up dq, atomically, or dq has a kernel of
  // its own, where num_splits blocks share the keys of a query. Parts of dq are then summed,
  // rounded and laid out by a further kernel; one split without atomics writes dq at once.
  bool dq_with_dkv;  // num_splits is 1 then
  int32_t num_splits;
  float* dq_parts;  // [num_splits, B, H, Tq padded to 64, D padded] in fragment order, or null
  int64_t dq_parts_floats;

  // Hopper only. Where blocks of keys are cut, the further kernel sums the parts of dk and dv too.
  KeyCut key_cut;
  float* dkv_parts;  // [pieces, block by block; dk and dv; 128 keys; D padded] likewise

  // Hopper only. Then dq, in parts also if that is one, and dk, which has none, are made of score
  // gradients that the kernel for dv left.
  GradientWindows windows;
};

enum class NormKind : int { kNone = 0, kRms = 1, kLayer = 2 };

constexpr int kMaxTurnedBack = 2;  // queries and keys

// Bias + norm + rotation of projected heads, and its adjoint.
struct NormRopeParams : RotationParams {
  int64_t batch;
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_dim;

  DType input_dtype;   // of x
  DType output_dtype;  // of y; in the backward, of grad and dx
  const void* x;       // [B, T, H*D] contiguous; in the backward null unless there is a norm
  const void* grad;    // backward only: [B, T, H, D] contiguous
  void* out;           // forward y [B, T, H, D], backward dx [B, T, H*D]; contiguous. Without a
                       // norm dx may take grad's place.

  const void* bias;  // [H*D] or null, in param_dtype
  DType bias_dtype;
  NormKind norm_kind;
  bool norm_inner;  // over H*D instead of D
  float norm_eps;
  const void* norm_weight;  // [D] or [H*D], or null
  const void* norm_bias;    // likewise
  DType norm_dtype;
  float* dnorm_weight;  // backward: partial sums [num_partials, W]; null when not wanted
  float* dnorm_bias;
  int32_t num_partials;
};

}  // namespace frx
