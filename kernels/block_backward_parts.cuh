// What both sides of a small block's attention backward share: the warps' parts of a tile, and the
// epilogue that adds them up and undoes the rotation. There a thread handles one pair of dims in
// some rows; it finds their angles early, while copies are under way.
#pragma once

#include "block_backward_params.h"
#include "mma.cuh"
#include "rope.cuh"
#include "storage.cuh"
#include "turns.cuh"

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

// One tile's place in a [B, T, H, D] tensor.
struct HeadTile {
  int64_t batch;
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

// Each thread finds the angles that it will use itself: no barrier lies between.
template <int kThreads, int kD>
__device__ __forceinline__ void find_tile_angles(TileAngles<kD>& angles, const BlockRotation& r,
                                                 const HeadTile& at) {
  using Shape = PairShape<kThreads, kD>;
  const int pair = threadIdx.x % Shape::kPairs;
  const HeadPair dims = head_pair(r, pair);
  if (!dims.turns) return;
  const int axis = quotient(pair, r.axis_pairs);
  const uint64_t turns = turns_of_pair(r, pair, axis);
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
template <int kThreads, int kD, int kParts, int kPartStride, class Element>
__device__ __forceinline__ void store_turned_back(Element* out, int64_t token_stride,
                                                  const float* parts, float factor, int head_dim,
                                                  const BlockRotation* r,
                                                  const TileAngles<kD>& angles,
                                                  const HeadTile& at) {
  using Shape = PairShape<kThreads, kD>;
  const int pair = threadIdx.x % Shape::kPairs;
  const HeadPair dims =
      r == nullptr ? HeadPair{2 * pair, 2 * pair + 1, false} : head_pair(*r, pair);
  if (dims.first >= head_dim) return;
#pragma unroll 2
  for (int row = threadIdx.x / Shape::kPairs; row < kBlockBackwardRows; row += Shape::kRowStep) {
    const int token = at.first_token + row;
    if (token >= at.num_tokens) return;
    Pair g = {0.f, 0.f};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float* sums = parts + part * kPartStride + row * (kD + 8);
      g.first += sums[dims.first];
      g.second += sums[dims.second];
    }
    g = {g.first * factor, g.second * factor};
    if (dims.turns) {
      const CosSin first = angles[row][pair];
      g = rotate_back(g, first, r->full_width ? table_entry(*r, at, token, dims.second) : first);
    }
    Element* to = out + row * token_stride;
    if (dims.second == dims.first + 1) {
      store2(to + dims.first, g.first, g.second);
    } else {
      to[dims.first] = from_float<Element>(g.first);
      to[dims.second] = from_float<Element>(g.second);
    }
  }
}

// Barrier of the warps that share a chunk. Barrier 0 is that of the whole block.
template <int kColumnWarps>
__device__ __forceinline__ void sync_chunk_warps(int chunk_warp) {
  if constexpr (kColumnWarps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + chunk_warp), "n"(32 * kColumnWarps) : "memory");
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
