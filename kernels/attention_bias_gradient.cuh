// The gradient of an attention bias: ds summed over whatever the bias was broadcast over.
#pragma once

#include "attention_backward_parts.cuh"
#include "launch.h"

namespace frx {

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

}  // namespace frx
