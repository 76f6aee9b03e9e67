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
// into the next product. attention_bias_gradient.cuh has the kernel of dbias.
#pragma once

#include "attention_backward_parts.cuh"
#include "attention_bias_gradient.cuh"
#include "launch.h"
#include "plan.h"

namespace frx {

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
