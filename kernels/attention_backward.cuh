// Portable attention backward (sm_80 and newer). Scores are recomputed tile by tile; no atomics, so
// the result is the same bits every time.
//
//   p  = exp(score - lse)                   dv = dropped(p)^T dout
//   ds = p * (dropped(dout v^T) - delta)    dk = scale ds^T q    dq = scale ds k    dbias = ds
//   delta = sum over the keys of p * dropped(dout v^T) - dlse, which is rowsum(dout * o) - dlse
//   (dlse: gradient of the returned log-sum-exp)
//
// One kernel serves dq and dk/dv: a block keeps 16 rows a warp of one side (queries, or keys) and
// streams tiles of the other, so that weights and score gradients go from accumulators straight
// into the next product. A second kernel sums ds over whatever the bias was broadcast over.
#pragma once

#include <type_traits>

#include "launch.h"
#include "mma.cuh"
#include "params.h"
#include "plan.h"
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

template <class Op, int kD, bool kKeySide>
struct BackwardSideShape : BackwardShape<Op, kD> {
  using Base = BackwardShape<Op, kD>;
  using Element = typename Op::Element;
  // Warps that share the output columns of each row, where one thread's registers cannot hold them
  // (dk and dv together, or the split operands of fp32). Each computes the scores for itself.
  static constexpr int kOutColumns = (kKeySide ? 2 : 1) * (Base::kHalf ? 1 : 2) * kD;
  static constexpr int kColumnWarps = kOutColumns <= 256 ? 1 : kOutColumns / 256;
  static constexpr int kThreads = 32 * Base::kRowWarps * kColumnWarps;
  static constexpr int kOutTiles = kD / kColumnWarps / 8;
  static constexpr int kQueries = kKeySide ? Base::kColumns : Base::kRows;
  static constexpr int kStatStages = kKeySide ? Base::kStages : 1;

  struct SharedStorage {
    alignas(16) Element stay_1[Base::kRows * kD];                      // q, or k
    alignas(16) Element stay_2[Base::kRows * kD];                      // dout, or v
    alignas(16) Element stream_1[Base::kStages][Base::kColumns * kD];  // k, or q
    alignas(16) Element stream_2[Base::kStages][Base::kColumns * kD];  // v, or dout
    RowStatistics<kQueries> rows[kStatStages];
  };
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

template <class Element, int kOutTiles>
__device__ __forceinline__ void store_rows(const HeadsView& view, int64_t b, int h,
                                           const float (&c)[kOutTiles][4], float factor,
                                           int first_row, int num_rows, int first_column,
                                           int head_dim, int lane) {
  Element* out = static_cast<Element*>(view.data) + b * view.batch_stride + h * view.head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half + lane / 4;
    if (row >= num_rows) continue;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const int d = first_column + 8 * n + 2 * (lane % 4);
      if (d >= head_dim) continue;
      store2(out + row * view.token_stride + d, c[n][2 * half] * factor,
             c[n][2 * half + 1] * factor);
    }
  }
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

template <class Op, int kD, bool kKeySide>
__global__ __launch_bounds__(
    BackwardSideShape<Op, kD, kKeySide>::kThreads,
    1) void attention_backward_kernel(const __grid_constant__ AttentionBackwardParams p) {
  using Shape = BackwardSideShape<Op, kD, kKeySide>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kStages = Shape::kStages;
  constexpr int kThreads = Shape::kThreads, kScoreTiles = Shape::kScoreTiles;

  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const Tile stay_1{shared.stay_1}, stay_2{shared.stay_2};

  // Which rows of which head stay with this block
  const AttentionSizes& sizes = p.sizes;
  const int num_rows = kKeySide ? sizes.num_keys : sizes.num_queries;
  const int row_heads = kKeySide ? sizes.num_kv_heads : sizes.num_heads;
  const int num_row_tiles = (num_rows + kRows - 1) / kRows;
  const int first_row = static_cast<int>(blockIdx.x % num_row_tiles) * kRows;
  const int row_head = blockIdx.x / num_row_tiles % row_heads;
  const int b = blockIdx.x / num_row_tiles / row_heads;
  const int group = sizes.num_heads / sizes.num_kv_heads;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % Shape::kRowWarps * 16;
  const int out_column =
      Shape::kColumnWarps == 1 ? 0 : warp / Shape::kRowWarps * (8 * Shape::kOutTiles);

  float out_1[1][Shape::kOutTiles][4] = {};  // dq, or dk
  float out_2[1][Shape::kOutTiles][4] = {};  // dv on the key side

  // Every query head that shares these keys; on the query side just its own
  const int first_head = kKeySide ? row_head * group : row_head;
  for (int h = first_head; h < first_head + (kKeySide ? group : 1); ++h) {
    const int kv_head = h / group;
    const HeadScores scores(sizes, p.scores, b, h, kScoreUnit<Element>);
    auto query_exists = [&](int query) { return query < sizes.num_queries; };
    auto key_exists = [&](int key) { return scores.key_exists(key); };

    const IndexRange tiles =
        kKeySide ? query_tiles_of_keys(first_row, kColumns, sizes.num_queries, scores.key_count,
                                       scores.is_causal)
                 : key_tiles_of_queries(first_row, kRows, kColumns, sizes.num_queries,
                                        scores.key_count, scores.is_causal);
    auto load_stream = [&](int tile) {
      const int stage = (tile - tiles.begin) % kStages, first = tile * kColumns;
      const Tile tile_1{shared.stream_1[stage]}, tile_2{shared.stream_2[stage]};
      if constexpr (kKeySide) {
        load_pair<kColumns, kThreads>(tile_1, tile_2, p.q, p.dout, b, h, first, sizes.head_dim,
                                      query_exists);
        load_row_statistics<Element, kThreads>(shared.rows[stage], p, scores.batch_head, first);
      } else {
        load_pair<kColumns, kThreads>(tile_1, tile_2, p.k, p.v, b, kv_head, first, sizes.head_dim,
                                      key_exists);
      }
      commit_copies();
    };

    if (tiles.begin >= tiles.end) continue;
    if constexpr (kKeySide) {
      load_pair<kRows, kThreads>(stay_1, stay_2, p.k, p.v, b, kv_head, first_row, sizes.head_dim,
                                 key_exists);
    } else {
      load_pair<kRows, kThreads>(stay_1, stay_2, p.q, p.dout, b, h, first_row, sizes.head_dim,
                                 query_exists);
      load_row_statistics<Element, kThreads>(shared.rows[0], p, scores.batch_head, first_row);
    }
    load_stream(tiles.begin);

    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int stage = (tile - tiles.begin) % kStages;
      if (kStages == 2 && tile + 1 < tiles.end) {
        load_stream(tile + 1);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();  // this tile is here

      const int lane = opaque(threadIdx.x % 32);
      const Tile stream_1{shared.stream_1[stage]}, stream_2{shared.stream_2[stage]};
      const int first_column = tile * kColumns;
      const int first_query = kKeySide ? first_column : first_row;
      const int first_key = kKeySide ? first_row : first_column;
      const int stat_stage = kKeySide ? stage : 0;

      float weights[1][kScoreTiles][4] = {}, ds[1][kScoreTiles][4] = {};
      multiply_rows<Op, 1, kScoreTiles, kD>(weights, stay_1, warp_row, stream_1, lane);
      multiply_rows<Op, 1, kScoreTiles, kD>(ds, stay_2, warp_row, stream_2, lane);
      const int row = first_row + warp_row + lane / 4, column = first_column + 2 * (lane % 4);
      weights_of_products<Element, kKeySide>(weights[0], scores, shared.rows[stat_stage], row,
                                             column, first_query,
                                             is_plain_tile(scores, first_query, Shape::kQueries,
                                                           first_key, kKeySide ? kRows : kColumns));
      gradients_of_scores<kKeySide>(weights[0], ds[0], scores, shared.rows[stat_stage], row, column,
                                    first_query);
      multiply_accumulators<Op, 1, kScoreTiles, Shape::kOutTiles>(out_1, ds, stream_1, out_column,
                                                                  lane);
      if constexpr (kKeySide) {
        multiply_accumulators<Op, 1, kScoreTiles, Shape::kOutTiles>(out_2, weights, stream_2,
                                                                    out_column, lane);
      }
      __syncthreads();  // every warp is done with this tile
      if (kStages == 1 && tile + 1 < tiles.end) load_stream(tile + 1);
    }
  }

  const int row = first_row + warp_row, lane = threadIdx.x % 32;
  store_rows<Element>(kKeySide ? p.dk : p.dq, b, row_head, out_1[0], p.scores.scale, row, num_rows,
                      out_column, sizes.head_dim, lane);
  if constexpr (kKeySide) {
    store_rows<Element>(p.dv, b, row_head, out_2[0], 1.f, row, num_rows, out_column, sizes.head_dim,
                        lane);
  }
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

// dbias of one tile of the bias: walks over every (batch, head, query tile) that the bias's
// elements were broadcast to and sums ds in registers. Axes of size 1 have stride 0; the key axis
// is whole (ops.py knows the gradient of a bias without one).
template <class Op, int kD>
__global__ __launch_bounds__(
    SingleStageShape<Op, kD>::kThreads,
    1) void attention_bias_gradient_kernel(const __grid_constant__ AttentionBackwardParams p) {
  using Shape = SingleStageShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kThreads = Shape::kThreads;

  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const Tile q_tile{shared.q}, dout_tile{shared.dout}, k_tile{shared.k}, v_tile{shared.v};

  // Which tile of the bias; a summed axis counts as one tile
  const AttentionSizes& sizes = p.sizes;
  const int q_tiles = (sizes.num_queries + kRows - 1) / kRows;
  const int k_tiles = (sizes.num_keys + kColumns - 1) / kColumns;
  const bool sum_batch = p.dbias.batch_stride == 0, sum_heads = p.dbias.head_stride == 0;
  const bool sum_queries = p.dbias.query_stride == 0;
  int64_t block = blockIdx.x;
  const int first_key = static_cast<int>(block % k_tiles) * kColumns;
  block /= k_tiles;
  const int q_tile_index = sum_queries ? 0 : block % q_tiles;
  if (!sum_queries) block /= q_tiles;
  const int bias_head = sum_heads ? 0 : block % sizes.num_heads;
  if (!sum_heads) block /= sizes.num_heads;
  const int64_t bias_batch = block;

  const int warp_row = threadIdx.x / 32 * 16;
  const int group = sizes.num_heads / sizes.num_kv_heads;
  float sum[Shape::kScoreTiles][4] = {};

  for (int64_t b = bias_batch; b < (sum_batch ? sizes.batch : bias_batch + 1); ++b) {
    for (int h = bias_head; h < (sum_heads ? sizes.num_heads : bias_head + 1); ++h) {
      const HeadScores scores(sizes, p.scores, b, h, kScoreUnit<Element>);
      for (int qt = q_tile_index; qt < (sum_queries ? q_tiles : q_tile_index + 1); ++qt) {
        const int first_query = qt * kRows;
        __syncthreads();  // every warp is done with the previous tiles
        load_pair<kRows, kThreads>(q_tile, dout_tile, p.q, p.dout, b, h, first_query,
                                   sizes.head_dim,
                                   [&](int query) { return query < sizes.num_queries; });
        load_row_statistics<Element, kThreads>(shared.rows, p, scores.batch_head, first_query);
        load_pair<kColumns, kThreads>(k_tile, v_tile, p.k, p.v, b, h / group, first_key,
                                      sizes.head_dim,
                                      [&](int key) { return scores.key_exists(key); });
        commit_copies();
        wait_copies<0>();
        __syncthreads();  // this pair of tiles is here

        const int lane = opaque(threadIdx.x % 32);
        float weights[1][Shape::kScoreTiles][4] = {}, ds[1][Shape::kScoreTiles][4] = {};
        multiply_rows<Op, 1, Shape::kScoreTiles, kD>(weights, q_tile, warp_row, k_tile, lane);
        multiply_rows<Op, 1, Shape::kScoreTiles, kD>(ds, dout_tile, warp_row, v_tile, lane);
        const int row = first_query + warp_row + lane / 4, column = first_key + 2 * (lane % 4);
        weights_of_products<Element, false>(weights[0], scores, shared.rows, row, column,
                                            first_query, false);
        gradients_of_scores<false>(weights[0], ds[0], scores, shared.rows, row, column,
                                   first_query);
#pragma unroll
        for (int n = 0; n < Shape::kScoreTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[n][i] += ds[0][n][i];
        }
      }
    }
  }

  // Sum the tile's rows where the bias has only one of them
  __syncthreads();  // the tiles' memory is free
  float* tile_sum = reinterpret_cast<float*>(smem);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Shape::kScoreTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + lane / 4 + 8 * (i / 2), column = 8 * n + 2 * (lane % 4) + i % 2;
      tile_sum[row * kColumns + column] = sum[n][i];
    }
  }
  __syncthreads();  // the whole tile is written
  for (int i = threadIdx.x; i < (sum_queries ? 1 : kRows) * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const int query = q_tile_index * kRows + row, key = first_key + column;
    if (query >= sizes.num_queries || key >= sizes.num_keys) continue;
    float total = 0.f;
    for (int r = row; r < (sum_queries ? kRows : row + 1); ++r) {
      total += tile_sum[r * kColumns + column];
    }
    const int64_t index = bias_batch * p.dbias.batch_stride + bias_head * p.dbias.head_stride +
                          query * p.dbias.query_stride + key * p.dbias.key_stride;
    store_float(p.dbias.data, index, total, p.scores.bias_dtype);
  }
}

template <class Op, int kD, bool kKeySide>
void launch_backward_side(const AttentionBackwardParams& p, cudaStream_t stream) {
  using Shape = BackwardSideShape<Op, kD, kKeySide>;
  const int64_t rows = kKeySide ? p.sizes.num_keys : p.sizes.num_queries;
  const int64_t heads = kKeySide ? p.sizes.num_kv_heads : p.sizes.num_heads;
  const int64_t blocks = (rows + Shape::kRows - 1) / Shape::kRows * heads * p.sizes.batch;
  launch(attention_backward_kernel<Op, kD, kKeySide>,
         kKeySide ? "attention_backward_keys" : "attention_backward_queries", blocks,
         Shape::kThreads, sizeof(typename Shape::SharedStorage), stream, p);
}

template <class Op, int kD>
void launch_bias_gradient(const AttentionBackwardParams& p, cudaStream_t stream) {
  using Shape = SingleStageShape<Op, kD>;
  const AttentionSizes& sizes = p.sizes;
  const int64_t q_tiles = (sizes.num_queries + Shape::kRows - 1) / Shape::kRows;
  const int64_t k_tiles = (sizes.num_keys + Shape::kColumns - 1) / Shape::kColumns;
  const int64_t blocks = (p.dbias.batch_stride == 0 ? 1 : sizes.batch) *
                         (p.dbias.head_stride == 0 ? 1 : sizes.num_heads) *
                         (p.dbias.query_stride == 0 ? 1 : q_tiles) * k_tiles;
  launch(attention_bias_gradient_kernel<Op, kD>, "attention_bias_gradient", blocks, Shape::kThreads,
         sizeof(typename Shape::SharedStorage), stream, p);
}

template <class Op, int kD>
void launch_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (p.dq.data != nullptr) launch_backward_side<Op, kD, false>(p, stream);
  if (p.dk.data != nullptr) launch_backward_side<Op, kD, true>(p, stream);
  if (p.dbias.data != nullptr) launch_bias_gradient<Op, kD>(p, stream);
}

template <class Op>
void dispatch_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
  switch (padded_head_dim(p.sizes.head_dim)) {
    case 32:
      return launch_backward<Op, 32>(p, stream);
    case 64:
      return launch_backward<Op, 64>(p, stream);
    case 128:
      return launch_backward<Op, 128>(p, stream);
    default:
      return launch_backward<Op, 256>(p, stream);
  }
}

}  // namespace frx
