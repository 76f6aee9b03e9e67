// How norm_rope's work is laid out over lanes, tiles and blocks. Host code and index arithmetic, so
// that a machine without a GPU tests it.
//
// A head's D dims are split in units, each two vectors of kVec dims, chosen so that the two members
// of every rotated pair fall into one unit. A head belongs to lanes_per_head neighbouring lanes of
// one warp, and a tile of tokens to one block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mask.cuh"
#include "params.h"
#include "rope.cuh"

namespace frx::norm_rope {

constexpr int kMaxHeadDim = 256;
constexpr int kWideVector = 4;   // dims a vector; two vectors a unit
constexpr int kScalarUnits = 4;  // units a lane where a vector is one dim: 256 / 2 / 32
constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 256;  // a block

template <int kVec>
constexpr int kUnitsPerLane = kVec == kWideVector ? 1 : kScalarUnits;

// Where the two vectors of a unit lie in a head, and the pairs they hold: element i of vector v
// belongs to pair[v] + i, or pair[v] + i / 2 where pairs are neighbours within a vector.
// Pairs at and beyond R / 2 do not rotate.
struct UnitPlace {
  int dim[2];
  int pair[2];
};

template <int kVec>
FRX_HOST_DEVICE bool pairs_within_vector(bool interleaved) {
  return kVec > 1 && interleaved;
}

template <int kVec>
FRX_HOST_DEVICE UnitPlace place_of_unit(int unit, int head_dim, int rotary_dim, int axes,
                                        bool interleaved) {
  const int start = kVec * unit;
  if (pairs_within_vector<kVec>(interleaved)) {
    // Vectors from both halves of the head, so that neighbouring lanes touch neighbouring bytes.
    const int second = head_dim / 2 + start;
    return {{start, second}, {start / 2, second / 2}};
  }
  if (2 * start < rotary_dim) {
    const PairDims dims = pair_dims(start, rotary_dim, axes, interleaved);
    return {{dims.first, dims.second}, {start, start}};
  }
  if (kVec == 1) return {{2 * unit, 2 * unit + 1}, {unit, unit}};
  const int first = rotary_dim / 2 + start;
  return {{first, first + (head_dim - rotary_dim) / 2}, {start, start}};
}

// Byte offsets in a block's shared memory, each a multiple of 16. At 0: float [3, 32], block sums.
struct SmemOffsets {
  int frequencies;  // double [R / 2]
  int angles;       // float [2, tokens_per_tile, D], at the end float [2, warps, D]
  int accumulated;  // float [2, H * D]
  int total;
};

struct Geometry {
  bool is_wide;  // vectors of kWideVector dims, else single dims and run-time element types
  int units_per_head;
  int lanes_per_head;  // power of two, at most 32
  int lanes_per_head_log2;
  int lanes_per_token;  // num_heads * lanes_per_head
  int64_t num_tokens;   // batch * num_tokens
  int tokens_per_tile;  // 1 for a norm over the inner width
  int64_t num_tiles;
  int threads;  // multiple of 32
  int blocks;
  bool stages_angles;        // angles come from positions, through shared memory
  bool accumulates_in_smem;  // an inner norm's weight gradients; else in the partial sums
  SmemOffsets smem;
};

// A norm over all heads of a token. norm_inner says nothing where there is no norm.
FRX_HOST_DEVICE bool has_inner_norm(const NormRopeParams& p) {
  return p.norm_inner && p.norm_kind != NormKind::kNone;
}

FRX_HOST_DEVICE bool sums_weight_gradients(const NormRopeParams& p) {
  if (p.norm_kind == NormKind::kNone) return false;
  return p.dnorm_weight != nullptr || p.dnorm_bias != nullptr;
}

// The backward without a norm: it moves and turns elements, nothing else.
FRX_HOST_DEVICE bool only_turns_back(const NormRopeParams& p) {
  return p.grad != nullptr && p.norm_kind == NormKind::kNone;
}

struct Launch {
  NormRopeParams params;
  Geometry geometry;
};

// What one launch takes back through rotations: the blocks of the first side come first.
struct RopeBackwardLaunch {
  Launch sides[kMaxTurnedBack];  // without blocks where there is none
  bool follows_attention;        // launched chained, behind a kernel of the attention's backward
};

inline int element_bytes(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 4;
}

inline bool is_aligned(const void* data, int bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether every access can move kWideVector elements. Only slices of packed buffers fail the
// alignment, only exotic rotations the divisibility. Projections come in fp32: halves have a fast
// forward but no fast backward.
inline bool can_be_wide(const NormRopeParams& p) {
  if (p.head_dim % (2 * kWideVector) != 0) return false;
  if (p.rotary_dim > 0 && !p.interleaved && p.rotary_dim / p.axes % (2 * kWideVector) != 0) {
    return false;
  }
  const bool reads_halves = p.x != nullptr && element_bytes(p.input_dtype) == 2;
  if (reads_halves && (p.grad != nullptr || p.input_dtype != p.output_dtype)) return false;
  const int out = kWideVector * element_bytes(p.output_dtype);
  const int norm = kWideVector * element_bytes(p.norm_dtype);
  return is_aligned(p.x, kWideVector * element_bytes(p.input_dtype)) && is_aligned(p.grad, out) &&
         is_aligned(p.out, out) && is_aligned(p.bias, kWideVector * element_bytes(p.bias_dtype)) &&
         is_aligned(p.norm_weight, norm) && is_aligned(p.norm_bias, norm) &&
         is_aligned(p.dnorm_weight, 16) && is_aligned(p.dnorm_bias, 16);
}

// What the kernels cannot index. Callers check shapes; this guards memory.
inline bool is_supported(const NormRopeParams& p) {
  return p.head_dim >= 1 && p.head_dim <= kMaxHeadDim && p.num_tokens <= INT32_MAX &&
         p.rotary_dim >= 0 && p.rotary_dim <= p.head_dim &&
         (p.rotary_dim == 0 || (p.axes >= 1 && p.rotary_dim % (2 * p.axes) == 0));
}

inline SmemOffsets smem_offsets(const NormRopeParams& p, const Geometry& g) {
  const auto aligned = [](int bytes) { return ceil_div(bytes, 16) * 16; };
  const int row_bytes = 2 * p.head_dim * static_cast<int>(sizeof(float));
  int angle_rows = g.stages_angles ? g.tokens_per_tile : 0;
  if (sums_weight_gradients(p) && !has_inner_norm(p)) {
    angle_rows = std::max(angle_rows, g.threads / kWarpSize);  // reused once angles are done with
  }
  SmemOffsets smem = {};
  smem.frequencies = 3 * kWarpSize * static_cast<int>(sizeof(float));
  smem.angles = smem.frequencies +
                aligned(g.stages_angles ? p.rotary_dim / 2 * static_cast<int>(sizeof(double)) : 0);
  smem.accumulated = smem.angles + aligned(angle_rows * row_bytes);
  smem.total = smem.accumulated + (g.accumulates_in_smem ? p.num_heads * row_bytes : 0);
  return smem;
}

// A block's share: tokens enough that computing frequencies and filling barriers is amortised, but
// no more than leaves every multiprocessor several blocks.
inline void choose_tile(const NormRopeParams& p, int num_sms, Geometry& g) {
  constexpr int kMinThreads = 64, kMaxPasses = 4;
  constexpr int kMaxAngleBytes = 24 * 1024;
  const auto whole_warps = [](int lanes) { return ceil_div(lanes, kWarpSize) * kWarpSize; };
  if (has_inner_norm(p)) {
    g.tokens_per_tile = 1;
    g.threads = std::min(whole_warps(g.lanes_per_token), kMaxThreads);
    return;
  }
  // Lanes a tile: a quarter of one multiprocessor's share of them all, within bounds.
  const int64_t share = g.num_tokens * g.lanes_per_token / (4 * num_sms);
  // Up to whole tokens where four blocks find room and no block is to come second.
  const bool rounds_up = only_turns_back(p) && share > kMinThreads;
  const int lanes =
      static_cast<int>(std::clamp<int64_t>(share + (rounds_up ? g.lanes_per_token - 1 : 0),
                                           kMinThreads, int64_t{kMaxThreads} * kMaxPasses));
  const int row_bytes = 2 * p.head_dim * static_cast<int>(sizeof(float));
  const int fitting = g.stages_angles ? std::max(1, kMaxAngleBytes / row_bytes) : lanes;
  g.tokens_per_tile = std::clamp(lanes / g.lanes_per_token, 1, fitting);
  const int tile_lanes = g.tokens_per_tile * g.lanes_per_token;
  g.threads = whole_warps(ceil_div(tile_lanes, ceil_div(tile_lanes, kMaxThreads)));
}

// max_smem_bytes: what one block may ask for.
inline Geometry make_geometry(const NormRopeParams& p, int num_sms, int max_smem_bytes) {
  constexpr int kBlocksPerSm = 16;
  Geometry g = {};
  g.is_wide = can_be_wide(p);
  g.units_per_head = g.is_wide ? p.head_dim / (2 * kWideVector) : ceil_div(p.head_dim, 2);
  while (1 << g.lanes_per_head_log2 < std::min(g.units_per_head, kWarpSize)) {
    ++g.lanes_per_head_log2;
  }
  g.lanes_per_head = 1 << g.lanes_per_head_log2;
  g.lanes_per_token = p.num_heads * g.lanes_per_head;
  g.num_tokens = p.batch * p.num_tokens;
  g.stages_angles = p.rotary_dim > 0 && p.cos == nullptr;
  choose_tile(p, num_sms, g);
  g.num_tiles = ceil_div(g.num_tokens, static_cast<int64_t>(g.tokens_per_tile));
  g.blocks = sums_weight_gradients(p)
                 ? p.num_partials
                 : static_cast<int>(std::min<int64_t>(g.num_tiles, num_sms * kBlocksPerSm));
  g.accumulates_in_smem = sums_weight_gradients(p) && has_inner_norm(p);
  if (smem_offsets(p, g).total > max_smem_bytes) g.accumulates_in_smem = false;
  g.smem = smem_offsets(p, g);
  return g;
}

}  // namespace frx::norm_rope
