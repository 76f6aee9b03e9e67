// What both sides of a small block's attention backward share: the warps' parts of a tile, and the
// epilogue that adds them up and undoes the rotation. There a thread handles one pair of dims in
// some rows; it finds their angles early, while copies are under way.
#pragma once

#include "block_backward_params.h"
#include "block_turns.cuh"
#include "grouped_gemm.cuh"  // defines: shared_address
#include "mma.cuh"
#include "rope.cuh"
#include "row_copier.cuh"
#include "storage.cuh"

namespace frx {

// Two dims of a head that are handled together, and whether they rotate.
struct HeadPair {
  int first, second;
  bool turns;
};

__device__ __forceinline__ HeadPair head_pair(const BlockRotation& r, int pair) {
  if (r.interleaved || pair >= r.rotary_dim / 2) {
    return {2 * pair, 2 * pair + 1, pair < r.rotary_dim / 2};
  }
  const int half_width = r.axis_pairs.value;
  const int first = pair + quotient(pair, r.axis_pairs) * half_width;
  return {first, first + half_width, true};
}

// How kThreads threads share the pairs of a tile of rows.
template <int kThreads, int kD>
struct PairShape {
  static constexpr int kPairs = kD / 2;
  static constexpr int kRowStep = kThreads / kPairs;
  static_assert(kThreads % kPairs == 0 && kBlockBackwardRows % kRowStep == 0, "whole rows");
};

template <int kD>
using TileAngles = CosSin[kBlockBackwardRows][kD / 2];  // of pairs that turn

// An operator with left and right operand in each other's role: gives the same bits as Op where
// the operands themselves are exchanged.
template <class Op>
struct ExchangedOp : Op {};

template <>
struct ExchangedOp<Tf32Op<4>> : Tf32Op<4> {
  static __device__ __forceinline__ void multiply_add(float (&c)[4], const A& a, const B& b) {
    uint32_t head[2], tail[2];
    split(b.r[0], head[0], tail[0]);
    split(b.r[1], head[1], tail[1]);
    float step[4] = {0.f, 0.f, 0.f, 0.f};
    mma_m16n8k8_tf32(step, a.tail, tail[0], tail[1]);
    mma_m16n8k8_tf32(step, a.tail, head[0], head[1]);
    mma_m16n8k8_tf32(step, a.head, tail[0], tail[1]);
    mma_m16n8k8_tf32(step, a.head, head[0], head[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += step[i];
  }
};

// One tile's place in a [B, T, H, D] tensor.
struct HeadTile {
  int batch;
  int head;
  int first_token, num_tokens;  // num_tokens: of the whole sequence
};

// Cosine and sine from a table; `index` counts pairs, or dims in a full-width table.
__device__ __forceinline__ CosSin table_entry(const RotationParams& r, const HeadTile& at,
                                              int token, int index) {
  const int64_t entry = at.batch * r.table_batch_stride + token * r.table_token_stride +
                        at.head * r.table_head_stride + index;
  return {r.cos[entry], r.sin[entry]};
}

// Where a thread's pairs of a gradient are, and how they turn. Found while copies are under way:
// after the products everybody would wait for it.
template <int kThreads, int kD, class Element>
struct GradientPlace {
  int first, second;  // dims
  char* out;          // the first member of the first row's pair
  int rows;           // from there on; none where the dims do not exist

  // r: null where nothing turns.
  __device__ __forceinline__ GradientPlace(const HeadsView& view, int head_dim,
                                           const BlockRotation* r, const HeadTile& at, int thread) {
    using Shape = PairShape<kThreads, kD>;
    const int pair = thread % Shape::kPairs, row = thread / Shape::kPairs;
    first = r == nullptr ? 2 * pair : head_pair(*r, pair).first;
    second = r == nullptr ? 2 * pair + 1 : head_pair(*r, pair).second;
    const int token = at.first_token + row;
    out = settled(reinterpret_cast<char*>(static_cast<Element*>(view.data) +
                                          offset_in(view, at.batch, token, at.head) + first));
    rows = first < head_dim ? at.num_tokens - token : 0;
  }
};

// Of the thread's pair.
template <int kThreads, int kD>
__device__ __forceinline__ uint64_t load_tile_turns(const BlockRotation& r) {
  const int pair = threadIdx.x % PairShape<kThreads, kD>::kPairs;
  if (r.cos != nullptr || !head_pair(r, pair).turns) return 0;
  return load_turns(r, pair, quotient(pair, r.axis_pairs));
}

// Each thread finds the angles that it will use itself: no barrier lies between.
template <int kThreads, int kD>
__device__ __forceinline__ void find_tile_angles(TileAngles<kD>& angles, const BlockRotation& r,
                                                 uint64_t turns, const HeadTile& at) {
  using Shape = PairShape<kThreads, kD>;
  const int pair = threadIdx.x % Shape::kPairs;
  const HeadPair dims = head_pair(r, pair);
  if (!dims.turns) return;
  const int axis = quotient(pair, r.axis_pairs);
  if (r.cos == nullptr && r.positions == nullptr) {
    // Free of branches, so that the angles of a thread are worked out side by side
#pragma unroll
    for (int i = 0; i < kBlockBackwardRows / Shape::kRowStep; ++i) {
      const int row = threadIdx.x / Shape::kPairs + i * Shape::kRowStep;
      angles[row][pair] = cos_sin_of_turn(fraction_of_turn({at.first_token + row, 0}, turns));
    }
    return;
  }
#pragma unroll 1
  for (int row = threadIdx.x / Shape::kPairs; row < kBlockBackwardRows; row += Shape::kRowStep) {
    const int token = at.first_token + row;
    if (token >= at.num_tokens) return;
    if (r.cos != nullptr) {
      angles[row][pair] = table_entry(r, at, token, r.full_width ? dims.first : pair);
    } else {
      angles[row][pair] =
          cos_sin_of_turn(fraction_of_turn(fixed_position_of(r, at.batch, token, axis), turns));
    }
  }
}

// Adds up kParts parts of a tile in a fixed order, [16][kD + 8] each and kPartStride floats apart,
// scales, turns back unless r is null, rounds once and stores.
template <int kParts, int kPartStride, int kThreads, int kD, class Element>
__device__ __forceinline__ void store_turned_back(const GradientPlace<kThreads, kD, Element>& place,
                                                  int64_t token_stride, const float* parts,
                                                  float factor, const BlockRotation* r,
                                                  const TileAngles<kD>& angles,
                                                  const HeadTile& at) {
  using Shape = PairShape<kThreads, kD>;
  const int first = place.first, second = place.second;
  const int pair = threadIdx.x % Shape::kPairs, first_row = threadIdx.x / Shape::kPairs;
  const bool adjacent = second == first + 1;
#pragma unroll
  for (int i = 0; i < kBlockBackwardRows / Shape::kRowStep; ++i) {
    if (i * Shape::kRowStep >= place.rows) return;
    const int row = first_row + i * Shape::kRowStep;
    Pair g = {0.f, 0.f};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float* sums = parts + part * kPartStride + row * (kD + 8);
      const float2 both = adjacent ? *reinterpret_cast<const float2*>(sums + first)
                                   : make_float2(sums[first], sums[second]);
      g.first += both.x;
      g.second += both.y;
    }
    g = {g.first * factor, g.second * factor};
    if (r != nullptr && pair < r->rotary_dim / 2) {
      const CosSin angle = angles[row][pair];
      g = rotate_back(g, angle,
                      r->full_width ? table_entry(*r, at, at.first_token + row, second) : angle);
    }
    Element* out = reinterpret_cast<Element*>(place.out) + i * Shape::kRowStep * token_stride;
    if (adjacent) {
      store2(out, g.first, g.second);
    } else {
      out[0] = from_float<Element>(g.first);
      out[second - first] = from_float<Element>(g.second);
    }
  }
}

// Copies 16 tokens of a head to a tile; what lies beyond `limit` tokens becomes zeros, and so do
// columns beyond the head dim.
template <class Tile, int kThreads, class Element>
class HeadCopier {
 public:
  __device__ __forceinline__ HeadCopier(const HeadsView& view, int batch, int head, int head_dim,
                                        int limit, int thread)
      : copier_(thread),
        limit_(copier_.column() < head_dim ? limit : 0),
        token_bytes_(view.token_stride * static_cast<int>(sizeof(Element))),
        source_(settled(reinterpret_cast<const char*>(static_cast<const Element*>(view.data) +
                                                      offset_in(view, batch, copier_.row(), head) +
                                                      copier_.column()))) {}

  // The tokens from `first` on.
  __device__ __forceinline__ void copy(uint32_t tile, int first) const {
    if (first + kBlockBackwardRows <= limit_) {
      copier_.copy(tile, source_ + first * token_bytes_, token_bytes_ * Copier::kRowStep);
    } else {
      copy_rows(tile, first, [](int) { return true; });
    }
  }

  // The same without tokens for which exists(token) is false.
  template <class Exists>
  __device__ __forceinline__ void copy_rows(uint32_t tile, int first, Exists exists) const {
    copier_.copy(tile, source_ + first * token_bytes_, token_bytes_ * Copier::kRowStep,
                 [&](int row) { return first + row < limit_ && exists(first + row); });
  }

 private:
  using Copier = RowCopier<Tile, kBlockBackwardRows, kThreads>;
  Copier copier_;
  int limit_;
  int64_t token_bytes_;
  const char* source_;
};

// Barrier of the warps that share a chunk.
template <int kColumnWarps>
__device__ __forceinline__ void sync_chunk_warps(int chunk_warp) {
  if constexpr (kColumnWarps == 1) {
    __syncwarp();
  } else {
    sync_threads(1 + chunk_warp, 32 * kColumnWarps);
  }
}

// A warp's accumulators of 16 rows into a part.
template <int kD, int kTiles>
__device__ __forceinline__ void store_part(float (*part)[kD + 8], const float (&c)[kTiles][4],
                                           int first_column, int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = lane / 4, column = first_column + 8 * n + 2 * (lane % 4);
    store2(&part[row][column], c[n][0], c[n][1]);
    store2(&part[row + 8][column], c[n][2], c[n][3]);
  }
}

}  // namespace frx
