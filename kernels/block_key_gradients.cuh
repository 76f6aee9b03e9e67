// Key side of a small block's attention backward: dk and dv. In the same launch, by blocks of their
// own: the products that do not depend on it.
//
// A block keeps 16 keys of one key head. The queries of every head that shares them are spread over
// its 4 warps in chunks of 16: a warp fetches the next chunk while it multiplies the one it has,
// and waits for nobody. In the end the warps' dk and dv meet in shared memory, where the rotation
// of the keys is undone.
#pragma once

#include "block_backward_parts.cuh"
#include "chained_launch.cuh"
#include "grouped_gemm.cuh"
#include "scores.cuh"

namespace frx {

template <class Op, int kD>
struct BlockKeyShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr int kHeadDim = kD;
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
    RowTerms rows[kQueries];
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

  __device__ __forceinline__ KeyTile(const BlockAttentionBackwardParams& p, int tile) {
    const AttentionSizes& sizes = p.attention.sizes;
    const ScoreModifiers& scores = p.attention.scores;
    const int batch_head = quotient(tile, p.key_tiles);
    first_key = first_token = (tile - batch_head * p.key_tiles.value) * kBlockBackwardRows;
    num_tokens = sizes.num_keys;
    batch = quotient(batch_head, p.kv_heads);
    head = batch_head - batch * p.kv_heads.value;
    group = p.heads_a_kv_head.value;
    chunks =
        query_tiles_of_keys(first_key, kBlockBackwardRows, sizes.num_queries,
                            key_count(scores.kv_lengths, batch, sizes.num_keys), scores.is_causal);
  }
};

// A warp's place in its walk over chunks of queries, head by head of the group.
struct QueryChunk {
  int head;   // of the group
  int chunk;  // of the head's

  __device__ __forceinline__ void settle(const KeyTile& at) {
    const int count = at.chunks.end - at.chunks.begin;
    while (chunk >= at.chunks.end && head < at.group) {
      chunk -= count;
      ++head;
      if (count <= 0) head = at.group;
    }
  }
  __device__ __forceinline__ bool exists(const KeyTile& at) const { return head < at.group; }
  __device__ __forceinline__ int first_query() const { return chunk * kBlockBackwardRows; }
};

// Copies chunks of one head's queries for a warp, or a pair of warps.
template <class Shape>
class QueryChunkCopier {
 public:
  __device__ __forceinline__ QueryChunkCopier(const BlockAttentionBackwardParams& p,
                                              const KeyTile& at, int head_of_group, int thread)
      : thread_(thread),
        num_queries_(p.attention.sizes.num_queries),
        q_(p.attention.q, at.batch, at.head * at.group + head_of_group, p.attention.sizes.head_dim,
           num_queries_, thread),
        dout_(p.attention.dout, at.batch, at.head * at.group + head_of_group,
              p.attention.sizes.head_dim, num_queries_, thread),
        rows_(settled(reinterpret_cast<const char*>(
            p.row_terms +
            static_cast<int64_t>(at.batch * p.heads.value + at.head * at.group + head_of_group) *
                num_queries_))) {}

  // An argument of the call.
  __device__ __forceinline__ void copy_queries(typename Shape::Chunk& shared,
                                               int first_query) const {
    q_.copy(shared_address(shared.q), first_query);
  }

  // What the query side has made of them.
  __device__ __forceinline__ void copy_gradients(typename Shape::Chunk& shared,
                                                 int first_query) const {
    dout_.copy(shared_address(shared.dout), first_query);
    if (thread_ >= Shape::kQueries) return;
    // Zeros for a query that does not exist, whose score is -inf
    const bool exists = first_query + thread_ < num_queries_;
    const int64_t row = exists ? first_query + thread_ : 0;
    copy_async_16(&shared.rows[thread_], rows_ + row * sizeof(RowTerms), exists);
  }

 private:
  using Copier =
      HeadCopier<typename Shape::Tile, 32 * Shape::kColumnWarps, typename Shape::Element>;
  int thread_, num_queries_;
  Copier q_, dout_;
  const char* rows_;
};

// Scores of one chunk of queries: rows are keys, columns queries.
template <class Op, class Shape>
__device__ __forceinline__ void score_query_chunk(const AttentionBackwardParams& p,
                                                  const KeyTile& at,
                                                  typename Shape::SharedStorage& shared,
                                                  typename Shape::Chunk& chunk,
                                                  const QueryChunk& item, float (&s)[1][2][4]) {
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  const int lane = opaque(threadIdx.x % 32);
  const HeadScores scores(p.sizes, p.scores, at.batch, at.head * at.group + item.head,
                          kScoreUnit<Element>);
  const int first_query = item.first_query();
  const bool is_plain =
      scores.is_plain() && first_query + Shape::kQueries <= scores.num_queries &&
      at.first_key + Shape::kRows <=
          keys_visible(first_query, scores.num_queries, scores.key_count, scores.is_causal);

  // The query side's operands exchanged, to the bit the same
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] = 0.f;
  }
  multiply_rows<ExchangedOp<Op>, 1, 2, Shape::kHeadDim>(s, Tile{shared.k}, 0, Tile{chunk.q}, lane);
  apply_modifiers<true>(s[0], scores, at.first_key + lane / 4, first_query + 2 * (lane % 4),
                        is_plain);
}

// dk and dv += what one chunk of queries gives. weights: its scores.
template <class Op, class Shape>
__device__ __forceinline__ void add_query_chunk(typename Shape::SharedStorage& shared,
                                                typename Shape::Chunk& chunk, int column,
                                                float (&weights)[1][2][4],
                                                float (&dk)[1][Shape::kOutTiles][4],
                                                float (&dv)[1][Shape::kOutTiles][4]) {
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  const int lane = opaque(threadIdx.x % 32);
  const Tile v_tile{shared.v}, q_tile{chunk.q}, dout_tile{chunk.dout};
  float ds[1][2][4] = {};
  multiply_rows<ExchangedOp<Op>, 1, 2, Shape::kHeadDim>(ds, v_tile, 0, dout_tile, lane);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const float4 row =
          *reinterpret_cast<const float4*>(&chunk.rows[8 * n + 2 * (lane % 4) + odd]);
      const float lse = row.x, weight_scale = row.y, delta = row.z, dlse = row.w;
#pragma unroll
      for (int i = odd; i < 4; i += 2) {
        const float weight = weight_of<Element>(weights[0][n][i] - lse) * weight_scale;
        weights[0][n][i] = weight;
        ds[0][n][i] = weight * ((ds[0][n][i] - delta) + dlse);
      }
    }
  }
  multiply_accumulators<Op, 1, 2, Shape::kOutTiles>(dk, ds, q_tile, column, lane);
  multiply_accumulators<Op, 1, 2, Shape::kOutTiles>(dv, weights, dout_tile, column, lane);
}

// One tile of 16 keys by a whole block. q, k and v are arguments, the rest comes from the kernel
// before.
template <class Op, class Shape>
__device__ __forceinline__ void differentiate_keys(const BlockAttentionBackwardParams& p, int tile,
                                                   typename Shape::SharedStorage& shared) {
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kD = Shape::kHeadDim;
  const AttentionBackwardParams& a = p.attention;
  const KeyTile at(p, tile);
  const uint64_t turns = load_tile_turns<Shape::kThreads, kD>(p.k_rotation);
  const int thread = threadIdx.x, warp = thread / 32;
  const int chunk_warp = warp % Shape::kChunkWarps, column_warp = warp / Shape::kChunkWarps;
  const int column = 8 * Shape::kOutTiles * column_warp;

  // Keys, values and queries do not depend on the query side
  const HeadScores scores(a.sizes, a.scores, at.batch, at.head * at.group);
  auto load_keys = [&](Element* to, const HeadsView& view) {
    const HeadCopier<Tile, Shape::kThreads, Element> copier(
        view, at.batch, at.head, a.sizes.head_dim, scores.key_count, thread);
    if (scores.key_keep == nullptr) {
      copier.copy(shared_address(to), at.first_key);
    } else {
      copier.copy_rows(shared_address(to), at.first_key,
                       [&](int key) { return scores.key_keep[key]; });
    }
  };
  load_keys(shared.k, a.k);
  load_keys(shared.v, a.v);
  QueryChunk item{0, at.chunks.begin + chunk_warp};
  item.settle(at);
  auto copier_of = [&](const QueryChunk& chunk) {
    return QueryChunkCopier<Shape>(p, at, chunk.head, 32 * column_warp + thread % 32);
  };
  const QueryChunkCopier<Shape> first = copier_of(item);
  auto chunk_of = [&](int stage) -> auto& { return shared.chunks[chunk_warp][stage]; };
  if (item.exists(at)) first.copy_queries(chunk_of(0), item.first_query());
  commit_copies();
  wait_for_previous_kernel();
  if (item.exists(at)) first.copy_gradients(chunk_of(0), item.first_query());
  let_next_kernel_start();
  commit_copies();
  wait_copies<1>();
  __syncthreads();  // keys are here, brought by all warps, and the first queries

  float dk[1][Shape::kOutTiles][4] = {}, dv[1][Shape::kOutTiles][4] = {};
  float weights[1][2][4];
  int stage = 0;
  auto score_item = [&] {
    if (item.exists(at)) {
      score_query_chunk<Op, Shape>(a, at, shared, chunk_of(stage), item, weights);
    }
  };
  // What needs no gradients, while they are under way
  score_item();
  using Place = GradientPlace<Shape::kThreads, kD, Element>;
  const Place dk_place(a.dk, a.sizes.head_dim, &p.k_rotation, at, thread);
  const Place dv_place(a.dv, a.sizes.head_dim, nullptr, at, thread);
  find_tile_angles<Shape::kThreads, kD>(shared.angles, p.k_rotation, turns, at);
  wait_copies<0>();
  sync_chunk_warps<Shape::kColumnWarps>(chunk_warp);  // the rest of the first chunk is here
#pragma unroll 1
  while (item.exists(at)) {
    item.chunk += Shape::kChunkWarps;
    item.settle(at);
    if (item.exists(at)) {
      const QueryChunkCopier<Shape> copier = copier_of(item);
      copier.copy_queries(chunk_of(stage ^ 1), item.first_query());
      copier.copy_gradients(chunk_of(stage ^ 1), item.first_query());
    }
    commit_copies();
    add_query_chunk<Op, Shape>(shared, chunk_of(stage), column, weights, dk, dv);
    wait_copies<0>();
    sync_chunk_warps<Shape::kColumnWarps>(chunk_warp);  // next chunk is here, this one was read
    stage ^= 1;
    score_item();
  }

  __syncthreads();  // every warp is done with its chunks, which the parts replace
  store_part<kD>(shared.parts[chunk_warp].dk, dk[0], column, thread % 32);
  store_part<kD>(shared.parts[chunk_warp].dv, dv[0], column, thread % 32);
  __syncthreads();  // all parts are written
  constexpr int kPartFloats = sizeof(typename Shape::Parts) / sizeof(float);
  store_turned_back<Shape::kChunkWarps, kPartFloats>(dk_place, a.dk.token_stride,
                                                     shared.parts[0].dk[0], a.scores.scale,
                                                     &p.k_rotation, shared.angles, at);
  store_turned_back<Shape::kChunkWarps, kPartFloats>(
      dv_place, a.dv.token_stride, shared.parts[0].dv[0], 1.f, nullptr, shared.angles, at);
}

// Blocks that share a multiprocessor, bounded by registers.
template <class Op, int kD>
constexpr int kKeyBlocks = kD == 128 || (Op::kSplits && kD == 64) ? 2
                           : Op::kSplits                          ? 3
                                                                  : 128 / kD;

template <class Op, class ProductOp, int kD>
__global__ __launch_bounds__(
    BlockKeyShape<Op, kD>::kThreads,
    kKeyBlocks<Op, kD>) void block_key_gradients_kernel(const __grid_constant__ BlockKeyParams p) {
  using Shape = BlockKeyShape<Op, kD>;
  using ProductShape = GemmShape<ProductOp, Shape::kThreads / 32>;
  extern __shared__ __align__(16) char smem[];
  if (!p.follows_kernel) wait_for_previous_kernel();
  if (blockIdx.x < p.key_blocks) {
    differentiate_keys<Op, Shape>(p.attention, blockIdx.x,
                                  *reinterpret_cast<typename Shape::SharedStorage*>(smem));
  } else {
    multiply_group_tile<ProductShape>(p.products, blockIdx.x - p.key_blocks, smem);
  }
}

}  // namespace frx
