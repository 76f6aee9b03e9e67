// What the portable kernels of the attention backward share: tiles, what the forward left of each
// query, and the step from raw products to weights and gradients of scores.
#pragma once

#include <type_traits>

#include "mma.cuh"
#include "params.h"
#include "scores.cuh"
#include "tile.cuh"

namespace frx {

// Tiles bounded by 255 registers a thread and 99 KB of shared memory a block.
template <class Op, int kD>
struct BackwardShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr bool kHalf = sizeof(Element) == 2;
  static constexpr int kRowWarps = !kHalf && kD == 256 ? 2 : 4;
  static constexpr int kRows = 16 * kRowWarps;  // of the side that stays
  static constexpr int kColumns =               // of the side that streams
      kHalf ? (kD <= 64 ? 64 : 32) : (kD == 256 || (Op::kSplits && kD >= 64) ? 16 : 32);
  static constexpr int kStages = kD == 256 || (!kHalf && kD == 128) ? 1 : 2;
  static constexpr int kScoreTiles = kColumns / 8;
};

// What the forward left of each query of a tile.
template <int kQueries>
struct RowStatistics {
  float lse[kQueries];  // in score units
  float delta[kQueries];
  float weight_scale[kQueries];
};

// lse is +inf where the row has no key or does not exist: its weights become exp(-inf) = 0.
template <class Element, int kThreads, int kQueries>
__device__ __forceinline__ void load_row_statistics(RowStatistics<kQueries>& rows,
                                                    const AttentionBackwardParams& p,
                                                    int64_t batch_head, int first_query) {
  for (int i = threadIdx.x; i < kQueries; i += kThreads) {
    const int query = first_query + i;
    const int64_t row = batch_head * p.sizes.num_queries + query;
    const bool exists = query < p.sizes.num_queries;
    const float lse = exists ? p.lse[row] : negative_infinity();
    rows.lse[i] = lse == negative_infinity() ? -negative_infinity() : lse * kScoreUnit<Element>;
    rows.delta[i] = exists ? p.delta[row] : 0.f;
    rows.weight_scale[i] = exists && p.weight_scale != nullptr ? p.weight_scale[row] : 1.f;
  }
}

// The query, counted from the tile's first, of element (n, i) of the accumulators.
template <bool kTransposed>
__device__ __forceinline__ int local_query(int n, int i, int row, int column, int first_query) {
  return (kTransposed ? column + 8 * n + i % 2 : row + 8 * (i / 2)) - first_query;
}

// In: p = q.k. Out: p = weights. Rows are queries, or keys when kTransposed.
template <class Element, bool kTransposed, int kNT, int kQueries>
__device__ __forceinline__ void weights_of_products(float (&p)[kNT][4], const HeadScores& scores,
                                                    const RowStatistics<kQueries>& rows, int row,
                                                    int column, int first_query, bool plain) {
  apply_modifiers<kTransposed>(p, scores, row, column, plain);
#pragma unroll
  for (int n = 0; n < kNT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = local_query<kTransposed>(n, i, row, column, first_query);
      p[n][i] = weight_of<Element>(p[n][i] - rows.lse[query]) * rows.weight_scale[query];
    }
  }
}

// In: p = weights, ds = dout.v. Out: p = weights after dropout, ds = gradient of the scores.
template <bool kTransposed, int kNT, int kQueries>
__device__ __forceinline__ void gradients_of_scores(float (&p)[kNT][4], float (&ds)[kNT][4],
                                                    const HeadScores& scores,
                                                    const RowStatistics<kQueries>& rows, int row,
                                                    int column, int first_query) {
  auto delta = [&](int n, int i) {
    return rows.delta[local_query<kTransposed>(n, i, row, column, first_query)];
  };
  if (!scores.has_dropout) {
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[n][i] = p[n][i] * (ds[n][i] - delta(n, i));
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kNT; n += 2) {
    draw_dropout<kTransposed>(scores, n, row, column, [&](int tile, int i, bool keep) {
      const float weight = p[tile][i];
      const float dweight = keep ? ds[tile][i] * scores.keep_scale : 0.f;
      ds[tile][i] = weight * (dweight - delta(tile, i));
      p[tile][i] = keep ? weight * scores.keep_scale : 0.f;
    });
  }
}

// A tile needs no bounds or masks when every query of it sees every key of it.
__device__ __forceinline__ bool is_plain_tile(const HeadScores& scores, int first_query,
                                              int queries, int first_key, int keys) {
  return scores.is_plain() && first_query + queries <= scores.num_queries &&
         first_key + keys <=
             keys_visible(first_query, scores.num_queries, scores.key_count, scores.is_causal);
}

// Loads matching tiles of two [B, T, H, D] tensors (q and dout, or k and v).
template <int kRows, int kThreads, class Tile, class RowExists>
__device__ __forceinline__ void load_pair(Tile tile_1, Tile tile_2, const HeadsView& view_1,
                                          const HeadsView& view_2, int64_t b, int h, int first_row,
                                          int head_dim, RowExists row_exists) {
  using Element = std::remove_pointer_t<decltype(tile_1.data)>;
  load_tile<kRows, kThreads>(
      tile_1, head_of<Element>(view_1, b, h) + first_row * view_1.token_stride, view_1.token_stride,
      head_dim, [&](int row) { return row_exists(first_row + row); });
  load_tile<kRows, kThreads>(
      tile_2, head_of<Element>(view_2, b, h) + first_row * view_2.token_stride, view_2.token_stride,
      head_dim, [&](int row) { return row_exists(first_row + row); });
}

template <class Op, int kD>
struct SingleStageShape : BackwardShape<Op, kD> {
  using Base = BackwardShape<Op, kD>;
  using Element = typename Op::Element;
  static constexpr int kThreads = 32 * Base::kRowWarps;
  struct SharedStorage {
    alignas(16) Element q[Base::kRows * kD];
    alignas(16) Element dout[Base::kRows * kD];
    alignas(16) Element k[Base::kColumns * kD];
    alignas(16) Element v[Base::kColumns * kD];
    RowStatistics<Base::kRows> rows;
  };
  static_assert(sizeof(SharedStorage) >= sizeof(float) * Base::kRows * Base::kColumns,
                "the sum over a tile reuses the tiles' memory");
};

}  // namespace frx
