// Key side of a small block's attention backward: dk and dv.
//
// A block keeps 16 keys of one key head. The queries of every head that shares them are spread over
// its 4 warps in chunks of 16: a warp fetches the next chunk while it multiplies the one it has,
// and waits for nobody. In the end the warps' dk and dv meet in shared memory, where the rotation
// of the keys is undone.
#pragma once

#include "block_backward_parts.cuh"
#include "chained_launch.cuh"
#include "scores.cuh"

namespace frx {

// 4 bytes from global to shared memory; zero where the source does not exist.
__device__ __forceinline__ void copy_async_4(float* smem, const float* gmem, bool exists) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(gmem),
               "r"(exists ? 4 : 0));
}

template <class Op, int kD>
struct BlockKeyShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr int kThreads = 128;
  static constexpr int kRows = kBlockBackwardRows;
  static constexpr int kQueries = 16;  // a chunk
  // As on the query side: dk and dv of 128 fp32 columns are too much for one warp.
  static constexpr int kColumnWarps = kD * sizeof(Element) > 256 ? 2 : 1;
  static constexpr int kChunkWarps = kThreads / 32 / kColumnWarps;
  static constexpr int kOutTiles = kD / kColumnWarps / 8;
  static constexpr int kStages = 2;

  struct Chunk {
    alignas(16) Element q[kQueries * kD];
    alignas(16) Element dout[kQueries * kD];
    float lse[kQueries], delta[kQueries], weight_scale[kQueries];
  };
  struct Parts {  // 32 bytes of padding: written without bank conflicts
    float dk[kRows][kD + 8];
    float dv[kRows][kD + 8];
  };
  struct SharedStorage {
    alignas(16) Element k[kRows * kD];
    alignas(16) Element v[kRows * kD];
    TileAngles<kD> angles;
    union {
      Chunk chunks[kChunkWarps][kStages];
      Parts parts[kChunkWarps];
    };
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "every GPU since sm_80 has it");
};

// Where a block's tile lies, and which chunks of queries see it: those of one head, times group.
struct KeyTile : HeadTile {
  int group;
  int first_key;
  IndexRange chunks;

  __device__ __forceinline__ KeyTile(const AttentionSizes& sizes, const ScoreModifiers& scores) {
    const int tiles = ceil_div(sizes.num_keys, kBlockBackwardRows);
    first_key = first_token = static_cast<int>(blockIdx.x % tiles) * kBlockBackwardRows;
    num_tokens = sizes.num_keys;
    head = blockIdx.x / tiles % sizes.num_kv_heads;
    batch = blockIdx.x / tiles / sizes.num_kv_heads;
    group = sizes.num_heads / sizes.num_kv_heads;
    chunks =
        query_tiles_of_keys(first_key, kBlockBackwardRows, sizes.num_queries,
                            key_count(scores.kv_lengths, batch, sizes.num_keys), scores.is_causal);
  }
  __device__ __forceinline__ int num_items() const { return group * (chunks.end - chunks.begin); }
  __device__ __forceinline__ int head_of_item(int item) const {
    return head * group + item / (chunks.end - chunks.begin);
  }
  __device__ __forceinline__ int first_query_of_item(int item) const {
    return (chunks.begin + item % (chunks.end - chunks.begin)) * kBlockBackwardRows;
  }
};

// Starts the copy of one warp's (or pair of warps') chunk of queries.
template <class Op, int kD>
__device__ __forceinline__ void load_query_chunk(const AttentionBackwardParams& p,
                                                 const KeyTile& at,
                                                 typename BlockKeyShape<Op, kD>::Chunk& shared,
                                                 int item, int thread) {
  using Shape = BlockKeyShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  const int h = at.head_of_item(item), first_query = at.first_query_of_item(item);
  const int num_queries = p.sizes.num_queries, head_dim = p.sizes.head_dim;
  constexpr int kSharers = 32 * Shape::kColumnWarps;
  auto query_exists = [&](int row) { return first_query + row < num_queries; };
  load_tile<Shape::kQueries, kSharers>(
      Tile{shared.q}, head_of<Element>(p.q, at.batch, h) + first_query * p.q.token_stride,
      p.q.token_stride, head_dim, query_exists, thread);
  load_tile<Shape::kQueries, kSharers>(
      Tile{shared.dout}, head_of<Element>(p.dout, at.batch, h) + first_query * p.dout.token_stride,
      p.dout.token_stride, head_dim, query_exists, thread);
  if (thread >= Shape::kQueries) return;
  const bool exists = query_exists(thread);
  const int64_t row =
      exists ? (at.batch * p.sizes.num_heads + h) * num_queries + first_query + thread : 0;
  copy_async_4(&shared.lse[thread], p.lse + row, exists);
  copy_async_4(&shared.delta[thread], p.delta + row, exists);
  copy_async_4(&shared.weight_scale[thread], p.weight_scale + row, exists);
}

// dk and dv += what one chunk of queries gives.
template <class Op, int kD>
__device__ __forceinline__ void add_query_chunk(
    const AttentionBackwardParams& p, const KeyTile& at,
    typename BlockKeyShape<Op, kD>::SharedStorage& shared,
    typename BlockKeyShape<Op, kD>::Chunk& chunk, int item, int column,
    float (&dk)[1][BlockKeyShape<Op, kD>::kOutTiles][4],
    float (&dv)[1][BlockKeyShape<Op, kD>::kOutTiles][4]) {
  using Shape = BlockKeyShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  const int lane = opaque(threadIdx.x % 32);
  const Tile k_tile{shared.k}, v_tile{shared.v}, q_tile{chunk.q}, dout_tile{chunk.dout};
  const HeadScores scores(p.sizes, p.scores, at.batch, at.head_of_item(item), kScoreUnit<Element>);
  const int first_query = at.first_query_of_item(item);
  const bool is_plain =
      scores.is_plain() && first_query + Shape::kQueries <= scores.num_queries &&
      at.first_key + Shape::kRows <=
          keys_visible(first_query, scores.num_queries, scores.key_count, scores.is_causal);

  // Rows are keys, columns queries
  float weights[1][2][4] = {}, ds[1][2][4] = {};
  multiply_rows<Op, 1, 2, kD>(weights, k_tile, 0, q_tile, lane);
  multiply_rows<Op, 1, 2, kD>(ds, v_tile, 0, dout_tile, lane);
  apply_modifiers<true>(weights[0], scores, at.first_key + lane / 4, first_query + 2 * (lane % 4),
                        is_plain);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int query = 8 * n + 2 * (lane % 4) + odd;
      // A row without keys: subtract +inf, so that its weights are 0.
      const float found = chunk.lse[query], delta = chunk.delta[query];
      const float lse = found == negative_infinity() ? -found : found * kScoreUnit<Element>;
      const float weight_scale = chunk.weight_scale[query];
#pragma unroll
      for (int i = odd; i < 4; i += 2) {
        const float weight = weight_of<Element>(weights[0][n][i] - lse) * weight_scale;
        weights[0][n][i] = weight;
        ds[0][n][i] = weight * (ds[0][n][i] - delta);
      }
    }
  }
  multiply_accumulators<Op, 1, 2, Shape::kOutTiles>(dk, ds, q_tile, column, lane);
  multiply_accumulators<Op, 1, 2, Shape::kOutTiles>(dv, weights, dout_tile, column, lane);
}

template <class Op, int kD>
__global__ __launch_bounds__(
    BlockKeyShape<Op, kD>::kThreads,
    Op::kSplits ? 1
                : 128 / kD) void block_key_gradients_kernel(const __grid_constant__
                                                                BlockAttentionBackwardParams p) {
  using Shape = BlockKeyShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  extern __shared__ __align__(16) char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const AttentionBackwardParams& a = p.attention;
  const KeyTile at(a.sizes, a.scores);
  const int thread = threadIdx.x, warp = thread / 32;
  const int chunk_warp = warp % Shape::kChunkWarps, column_warp = warp / Shape::kChunkWarps;
  const int column = 8 * Shape::kOutTiles * column_warp;
  const int num_items = at.num_items();
  let_next_kernel_start();

  // Keys, values and angles do not depend on the query side
  const HeadScores scores(a.sizes, a.scores, at.batch, at.head * at.group);
  auto load_keys = [&](Element* tile, const HeadsView& view) {
    load_tile<Shape::kRows, Shape::kThreads>(
        Tile{tile}, head_of<Element>(view, at.batch, at.head) + at.first_key * view.token_stride,
        view.token_stride, a.sizes.head_dim,
        [&](int row) { return scores.key_exists(at.first_key + row); });
  };
  load_keys(shared.k, a.k);
  load_keys(shared.v, a.v);
  find_tile_angles<Shape::kThreads, kD>(shared.angles, p.k_rotation, at);
  wait_for_previous_kernel();

  auto load_item = [&](int item, int stage) {
    if (item < num_items) {
      load_query_chunk<Op, kD>(a, at, shared.chunks[chunk_warp][stage], item,
                               32 * column_warp + thread % 32);
    }
    commit_copies();  // also an empty group, so that their count is known
  };
  load_item(chunk_warp, 0);  // in one group with the keys
  wait_copies<0>();
  __syncthreads();  // keys are here, brought by all warps, and the first chunk

  float dk[1][Shape::kOutTiles][4] = {}, dv[1][Shape::kOutTiles][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int item = chunk_warp; item < num_items; item += Shape::kChunkWarps) {
    load_item(item + Shape::kChunkWarps, stage ^ 1);
    add_query_chunk<Op, kD>(a, at, shared, shared.chunks[chunk_warp][stage], item, column, dk, dv);
    wait_copies<0>();
    sync_chunk_warps<Shape::kColumnWarps>(chunk_warp);  // next chunk is here, this one was read
    stage ^= 1;
  }

  __syncthreads();  // every warp is done with its chunks, which the parts replace
  store_part<kD>(shared.parts[chunk_warp].dk, dk[0], column, thread % 32);
  store_part<kD>(shared.parts[chunk_warp].dv, dv[0], column, thread % 32);
  __syncthreads();  // all parts are written
  constexpr int kPartFloats = sizeof(typename Shape::Parts) / sizeof(float);
  auto store = [&](const HeadsView& view, const float* parts, float factor,
                   const BlockRotation* rotation) {
    store_turned_back<Shape::kThreads, kD, Shape::kChunkWarps, kPartFloats>(
        static_cast<Element*>(view.data) + offset_in(view, at.batch, at.first_key, at.head),
        view.token_stride, parts, factor, a.sizes.head_dim, rotation, shared.angles, at);
  };
  store(a.dk, shared.parts[0].dk[0], a.scores.scale, &p.k_rotation);
  store(a.dv, shared.parts[0].dv[0], 1.f, nullptr);
}

template <class Op, int kD>
void launch_block_keys(const BlockAttentionBackwardParams& p, bool is_chained,
                       cudaStream_t stream) {
  using Shape = BlockKeyShape<Op, kD>;
  const AttentionSizes& sizes = p.attention.sizes;
  const int64_t blocks = static_cast<int64_t>(ceil_div(sizes.num_keys, Shape::kRows)) *
                         sizes.num_kv_heads * sizes.batch;
  const auto launch_it = is_chained ? launch_chained<BlockAttentionBackwardParams>
                                    : launch<BlockAttentionBackwardParams>;
  launch_it(block_key_gradients_kernel<Op, kD>, "block_key_gradients", blocks, Shape::kThreads,
            sizeof(typename Shape::SharedStorage), stream, p);
}

}  // namespace frx
