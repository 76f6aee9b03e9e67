// Portable attention forward (sm_80 and newer): o = softmax(scale q k^T + bias) v for one tile of
// queries of one head, with online softmax; nothing of size Tq x Tk is stored.
//
// A block has four warps of rows; each owns 16 * kMT query rows, keeps their output in registers,
// and walks over the key tiles. K and V tiles have one buffer each: V arrives while scores are
// computed, the next K while the weights multiply V. With split keys a block covers a range of key
// tiles and writes a partial result in fp32.
#pragma once

#include "launch.h"
#include "mma.cuh"
#include "params.h"
#include "plan.h"
#include "scores.cuh"
#include "storage.cuh"
#include "tile.cuh"

namespace frx {

// Running maximum and sum of a thread's 2 * kMT query rows, and the rescaling of their outputs.
template <class Element, int kMT, int kScoreTiles, int kOutTiles>
struct OnlineSoftmax {
  float row_max[kMT][2];
  float row_sum[kMT][2];  // of this thread's columns; finish() adds the other three threads'

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kMT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = negative_infinity();
        row_sum[m][half] = 0.f;
      }
    }
  }

  // Scores become weights relative to the new maximum.
  __device__ void update(float (&s)[kMT][kScoreTiles][4], float (&o)[kMT][kOutTiles][4]) {
#pragma unroll
    for (int m = 0; m < kMT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_max = negative_infinity();
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          tile_max = fmaxf(tile_max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 2));
        const float new_max = fmaxf(row_max[m][half], tile_max);
        // A row without a key so far: subtract 0 rather than -inf, so that its weights are 0.
        const float base = new_max == negative_infinity() ? 0.f : new_max;
        const float rescale = weight_of<Element>(row_max[m][half] - base);
        row_max[m][half] = new_max;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * half + e];
            x = weight_of<Element>(x - base);
            sum += x;
          }
        }
        row_sum[m][half] = row_sum[m][half] * rescale + sum;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          o[m][n][2 * half] *= rescale;
          o[m][n][2 * half + 1] *= rescale;
        }
      }
    }
  }

  // Sum over the four threads of each row.
  __device__ void finish() {
#pragma unroll
    for (int m = 0; m < kMT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& sum = row_sum[m][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
      }
    }
  }
};

template <class Op, int kD, int kMT>
struct ForwardShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr int kRowWarps = 4;
  // fp32 outputs of 256 columns exceed a thread's registers: two warps share the columns of a row,
  // each computing the scores for itself.
  static constexpr int kColumnWarps = sizeof(Element) == 4 && kD == 256 ? 2 : 1;
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  // Blocks a multiprocessor that the compiler is asked for: with which it does not spill.
  static constexpr int kMinBlocks = kD <= (sizeof(Element) == 2 ? 64 : 32) ? 1 : 0;
  static constexpr int kTileQ = 16 * kMT * kRowWarps;
  static constexpr int kTileK = forward_tile_keys(sizeof(Element) == 2, kD, kTileQ);
  static constexpr int kScoreTiles = kTileK / 8;
  static constexpr int kOutTiles = kD / kColumnWarps / 8;

  using Softmax = OnlineSoftmax<Element, kMT, kScoreTiles, kOutTiles>;

  struct SharedStorage {
    alignas(16) Element q[kTileQ * kD];
    alignas(16) Element k[kTileK * kD];
    alignas(16) Element v[kTileK * kD];
  };
};

// One row pair's worth of results: o / sum to the output or, with split keys, to its partial.
template <class Shape, int kMT>
__device__ __forceinline__ void store_output(const AttentionForwardParams& p,
                                             const typename Shape::Softmax& softmax,
                                             const float (&o)[kMT][Shape::kOutTiles][4],
                                             float keep_scale, int64_t b, int h, int split,
                                             int first_row, int first_column, int lane) {
  using Element = typename Shape::Element;
  const AttentionSizes& sizes = p.sizes;
#pragma unroll
  for (int m = 0; m < kMT; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_row + 16 * m + 8 * half + lane / 4;
      if (query >= sizes.num_queries) continue;
      const float sum = softmax.row_sum[m][half];
      const float factor = sum > 0.f ? keep_scale / sum : 0.f;
      const float lse = sum > 0.f ? softmax.row_max[m][half] / kScoreUnit<Element> + logf(sum)
                                  : negative_infinity();
      const int64_t row = (b * sizes.num_heads + h) * sizes.num_queries + query;
      const int64_t rows = sizes.batch * sizes.num_heads * sizes.num_queries;
      const bool is_split = p.num_splits > 1;
      if (lane % 4 == 0 && first_column == 0)
        (is_split ? p.partial_lse + split * rows : p.lse)[row] = lse;
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; ++n) {
        const int d = first_column + 8 * n + 2 * (lane % 4);
        if (d >= sizes.head_dim) continue;
        const float x = o[m][n][2 * half] * factor, y = o[m][n][2 * half + 1] * factor;
        if (is_split) {
          store2(p.partial_o + (split * rows + row) * sizes.head_dim + d, x, y);
        } else {
          store2(static_cast<Element*>(p.o.data) + offset_in(p.o, b, query, h) + d, x, y);
          if (p.o_rest.data != nullptr) {
            store2(static_cast<Element*>(p.o_rest.data) + offset_in(p.o_rest, b, query, h) + d,
                   x - to_float(from_float<Element>(x)), y - to_float(from_float<Element>(y)));
          }
        }
      }
    }
  }
}

template <class Op, int kD, int kMT>
__global__ __launch_bounds__(
    ForwardShape<Op, kD, kMT>::kThreads,
    ForwardShape<Op, kD, kMT>::kMinBlocks) void attention_forward_kernel(const __grid_constant__
                                                                             AttentionForwardParams
                                                                                 p) {
  using Shape = ForwardShape<Op, kD, kMT>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK, kThreads = Shape::kThreads;

  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const Tile q_tile{shared.q}, k_tile{shared.k}, v_tile{shared.v};

  // Which query tile of which head, and which part of its keys
  const AttentionSizes& sizes = p.sizes;
  const int num_q_tiles = (sizes.num_queries + kTileQ - 1) / kTileQ;
  int64_t block = blockIdx.x;
  const int split = block % p.num_splits;
  block /= p.num_splits;
  const int first_query = static_cast<int>(block % num_q_tiles) * kTileQ;
  block /= num_q_tiles;
  const int h = block % sizes.num_heads;
  const int b = static_cast<int>(block / sizes.num_heads);
  const int kv_head = h / (sizes.num_heads / sizes.num_kv_heads);
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % Shape::kRowWarps * 16 * kMT;
  const int out_column =
      Shape::kColumnWarps == 1 ? 0 : warp / Shape::kRowWarps * (8 * Shape::kOutTiles);

  const HeadScores scores(sizes, p.scores, b, h, kScoreUnit<Element>);
  const IndexRange visible = key_tiles_of_queries(first_query, kTileQ, kTileK, sizes.num_queries,
                                                  scores.key_count, scores.is_causal);
  const int tiles_a_split = (visible.end + p.num_splits - 1) / p.num_splits;
  const int begin = split * tiles_a_split;
  const int end = min(begin + tiles_a_split, visible.end);
  const int plain_end = scores.is_plain() && first_query + kTileQ <= sizes.num_queries
                            ? unmasked_key_tiles(first_query, kTileK, sizes.num_queries,
                                                 scores.key_count, scores.is_causal)
                            : 0;

  auto load_keys = [&](Tile tile, const HeadsView& view, int key_tile) {
    const int first_key = key_tile * kTileK;
    load_tile<kTileK, kThreads>(
        tile, head_of<Element>(view, b, kv_head) + first_key * view.token_stride, view.token_stride,
        sizes.head_dim, [&](int row) { return scores.key_exists(first_key + row); });
    commit_copies();
  };

  float o[kMT][Shape::kOutTiles][4] = {};
  typename Shape::Softmax softmax;

  if (begin < end) {
    load_tile<kTileQ, kThreads>(
        q_tile, head_of<Element>(p.q, b, h) + first_query * p.q.token_stride, p.q.token_stride,
        sizes.head_dim, [&](int row) { return first_query + row < sizes.num_queries; });
    load_keys(k_tile, p.k, begin);
  }
  for (int tile = begin; tile < end; ++tile) {
    const int lane = opaque(threadIdx.x % 32);
    const int first_key = tile * kTileK;
    const int row = first_query + warp_row + lane / 4, column = first_key + 2 * (lane % 4);

    // Scores of this tile, while V arrives
    wait_copies<0>();
    __syncthreads();  // K is here, and every warp is done with the previous V
    load_keys(v_tile, p.v, tile);
    float s[kMT][Shape::kScoreTiles][4] = {};
    multiply_rows<Op, kMT, Shape::kScoreTiles, kD>(s, q_tile, warp_row, k_tile, lane);
#pragma unroll
    for (int m = 0; m < kMT; ++m) {
      apply_modifiers<false>(s[m], scores, row + 16 * m, column, tile < plain_end);
    }
    softmax.update(s, o);

    // Dropout acts on the weights, not on their sum
    if (scores.has_dropout) {
#pragma unroll
      for (int m = 0; m < kMT; ++m) {
#pragma unroll
        for (int n = 0; n < Shape::kScoreTiles; n += 2) {
          draw_dropout<false>(scores, n, row + 16 * m, column, [&](int tile_n, int i, bool keep) {
            s[m][tile_n][i] = keep ? s[m][tile_n][i] : 0.f;
          });
        }
      }
    }

    // Weighted sum of V, while the next K arrives
    wait_copies<0>();
    __syncthreads();  // V is here, and every warp is done with K
    if (tile + 1 < end) load_keys(k_tile, p.k, tile + 1);
    multiply_accumulators<Op, kMT, Shape::kScoreTiles, Shape::kOutTiles>(o, s, v_tile, out_column,
                                                                         lane);
  }

  softmax.finish();
  store_output<Shape, kMT>(p, softmax, o, scores.has_dropout ? scores.keep_scale : 1.f, b, h, split,
                           first_query + warp_row, out_column, threadIdx.x % 32);
}

template <class Op, int kD, int kMT>
void launch_forward(const AttentionForwardParams& p, cudaStream_t stream) {
  using Shape = ForwardShape<Op, kD, kMT>;
  const int64_t q_tiles = (p.sizes.num_queries + Shape::kTileQ - 1) / Shape::kTileQ;
  const int64_t blocks = p.sizes.batch * p.sizes.num_heads * q_tiles * p.num_splits;
  launch(attention_forward_kernel<Op, kD, kMT>, "attention_forward", blocks, Shape::kThreads,
         sizeof(typename Shape::SharedStorage), stream, p);
}

// Operators of 16-bit elements have a 128-query version for every head dim whose registers allow
// it.
template <class Op>
void dispatch_forward(const AttentionForwardParams& p, cudaStream_t stream) {
  constexpr int kMaxMT = sizeof(typename Op::Element) == 2 ? 2 : 1;
  const bool wide = p.tile_queries == 128;
  switch (padded_head_dim(p.sizes.head_dim)) {
    case 32:
      return wide ? launch_forward<Op, 32, kMaxMT>(p, stream)
                  : launch_forward<Op, 32, 1>(p, stream);
    case 64:
      return wide ? launch_forward<Op, 64, kMaxMT>(p, stream)
                  : launch_forward<Op, 64, 1>(p, stream);
    case 128:
      return wide ? launch_forward<Op, 128, kMaxMT>(p, stream)
                  : launch_forward<Op, 128, 1>(p, stream);
    default:
      return launch_forward<Op, 256, 1>(p, stream);
  }
}

}  // namespace frx
