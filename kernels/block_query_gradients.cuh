// Query side of a small block's attention backward: dout, the sums of rows, dq.
//
// A block keeps 16 queries of one head. Its 8 warps first share the depth of dout = dy w_out, which
// no other block computes; then the keys are spread over them in chunks of 16. Each warp sums
// weights and weight gradients of its chunks, the warps agree on every row's delta (see
// attention_row_sums.cuh), and each adds its chunks to a dq of its own; in the end those meet in
// shared memory, where the rotation is undone. Up to one chunk a warp, nothing is computed twice.
#pragma once

#include "block_backward_parts.cuh"
#include "grouped_gemm.cuh"
#include "scores.cuh"

namespace frx {

template <class Op, int kD>
struct BlockQueryShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr int kThreads = 256;
  static constexpr int kRows = kBlockBackwardRows;
  static constexpr int kKeys = 16;  // a chunk
  static constexpr int kChunkBytes = 2 * kKeys * kD * sizeof(Element);
  // fp32 outputs of 128 columns leave a thread too few registers: two warps then share a chunk and
  // its columns, each computing the scores for itself.
  static constexpr int kColumnWarps = kChunkBytes > 8 * 1024 ? 2 : 1;
  static constexpr int kKeyWarps = kThreads / 32 / kColumnWarps;
  static constexpr int kOutTiles = kD / kColumnWarps / 8;

  // dout = dy w_out, in stages of one step a warp
  static constexpr int kDepth = kThreads / 32 * Op::kK;
  using DyTile = SmemTile<Element, kDepth>;
  using WeightTile = DepthTile<Element, kD>;
  struct Stage {
    alignas(16) Element dy[kRows * kDepth];
    alignas(16) Element weight[kDepth * kD];
  };
  static constexpr int kStages = kD == 32 ? 4 : 2;

  using Part = float[kRows][kD + 8];  // 32 bytes of padding: written without bank conflicts
  struct Chunk {
    alignas(16) Element k[kKeys * kD];
    alignas(16) Element v[kKeys * kD];
  };
  // The first keys arrive while dout is computed, where there is room for both.
  static constexpr bool kEarlyKeys = kD * sizeof(Element) <= 128;
  static constexpr int kChunksBytes = kKeyWarps * sizeof(Chunk);
  union Scratch {
    Stage stages[kStages];
    Part parts[kThreads / 32];
    char late_chunks[kEarlyKeys ? 1 : kChunksBytes];
  };
  struct SharedStorage {
    alignas(16) Element q[kRows * kD];
    alignas(16) Element dout[kRows * kD];
    TileAngles<kD> angles;
    float weight_sum[kKeyWarps][kRows], gradient_sum[kKeyWarps][kRows];
    float weight_scale[kRows], delta[kRows];
    Scratch scratch;
    alignas(16) char early_chunks[kEarlyKeys ? kChunksBytes : 1];

    __device__ __forceinline__ Chunk* chunks() {
      return reinterpret_cast<Chunk*>(kEarlyKeys ? early_chunks : scratch.late_chunks);
    }
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "every GPU since sm_80 has it");
};

// Where a block's tile lies, and whose keys it sees.
struct QueryTile : HeadTile {
  int kv_head;
  int first_query;

  __device__ __forceinline__ explicit QueryTile(const AttentionSizes& sizes) {
    const int tiles = ceil_div(sizes.num_queries, kBlockBackwardRows);
    first_query = first_token = static_cast<int>(blockIdx.x % tiles) * kBlockBackwardRows;
    num_tokens = sizes.num_queries;
    head = blockIdx.x / tiles % sizes.num_heads;
    batch = blockIdx.x / tiles / sizes.num_heads;
    kv_head = head / (sizes.num_heads / sizes.num_kv_heads);
  }
};

// Starts the copy of one warp's (or pair of warps') chunk of keys and values.
template <class Op, int kD>
__device__ __forceinline__ void load_key_chunk(const AttentionBackwardParams& p,
                                               const HeadScores& scores, const QueryTile& at,
                                               typename BlockQueryShape<Op, kD>::Chunk& shared,
                                               int chunk, int thread) {
  using Shape = BlockQueryShape<Op, kD>;
  using Element = typename Op::Element;
  const int first_key = chunk * Shape::kKeys;
  auto key_exists = [&](int row) { return scores.key_exists(first_key + row); };
  const Element* k = head_of<Element>(p.k, at.batch, at.kv_head) + first_key * p.k.token_stride;
  const Element* v = head_of<Element>(p.v, at.batch, at.kv_head) + first_key * p.v.token_stride;
  constexpr int kSharers = 32 * Shape::kColumnWarps;
  load_tile<Shape::kKeys, kSharers>(typename Shape::Tile{shared.k}, k, p.k.token_stride,
                                    p.sizes.head_dim, key_exists, thread);
  load_tile<Shape::kKeys, kSharers>(typename Shape::Tile{shared.v}, v, p.v.token_stride,
                                    p.sizes.head_dim, key_exists, thread);
}

// Starts the copy of one stage of dy and w_out.
template <class Op, int kD>
__device__ __forceinline__ void load_dout_stage(const BlockAttentionBackwardParams& p,
                                                const QueryTile& at,
                                                typename BlockQueryShape<Op, kD>::Stage& shared,
                                                int stage, int thread) {
  using Shape = BlockQueryShape<Op, kD>;
  using Element = typename Op::Element;
  const AttentionSizes& sizes = p.attention.sizes;
  const int start = stage * Shape::kDepth, depth = p.out_width;
  const int64_t inner = static_cast<int64_t>(sizes.num_heads) * sizes.head_dim;
  const Element* dy = static_cast<const Element*>(p.dy) +
                      (at.batch * sizes.num_queries + at.first_query) * depth + start;
  const Element* weight =
      static_cast<const Element*>(p.w_out) + start * inner + at.head * sizes.head_dim;
  load_rows<Shape::kRows, Shape::kThreads>(
      typename Shape::DyTile{shared.dy}, dy, depth, depth - start,
      [&](int row) { return at.first_query + row < at.num_tokens; }, thread);
  load_rows<Shape::kDepth, Shape::kThreads>(
      typename Shape::WeightTile{{shared.weight}}, weight, inner, sizes.head_dim,
      [&](int row) { return start + row < depth; }, thread);
}

// The tile of dout from the warps' parts: rounded, to shared memory and for the key side to global.
template <class Op, int kD>
__device__ __forceinline__ void store_dout(
    const AttentionBackwardParams& p, const QueryTile& at,
    typename BlockQueryShape<Op, kD>::SharedStorage& shared) {
  using Shape = BlockQueryShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  const Tile tile{shared.dout};
  for (int i = threadIdx.x; i < Shape::kRows * kD / 2; i += Shape::kThreads) {
    const int row = i / (kD / 2), d = i % (kD / 2) * 2, query = at.first_query + row;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int warp = 0; warp < Shape::kThreads / 32; ++warp) {
      x += shared.scratch.parts[warp][row][d];
      y += shared.scratch.parts[warp][row][d + 1];
    }
    store2(tile.chunk(row, d / Tile::kChunkElements) + d % Tile::kChunkElements, x, y);
    if (query < at.num_tokens && d < p.sizes.head_dim) {
      store2(static_cast<Element*>(p.dout.data) + offset_in(p.dout, at.batch, query, at.head) + d,
             x, y);
    }
  }
}

// dout = dy w_out of the tile, each warp a share of the depth. The first stages are under way.
template <class Op, int kD, class Load>
__device__ __forceinline__ void project_dout(
    const BlockAttentionBackwardParams& p, const QueryTile& at,
    typename BlockQueryShape<Op, kD>::SharedStorage& shared, int num_stages, Load load) {
  using Shape = BlockQueryShape<Op, kD>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float c[kD / 8][4] = {};
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    wait_copies<Shape::kStages - 2>();
    __syncthreads();  // stage i is here, and every warp is done with stage i - 1
    load(i + Shape::kStages - 1);
    auto& stage = shared.scratch.stages[i % Shape::kStages];
    const typename Op::A a = Op::load_a(typename Shape::DyTile{stage.dy}, 0, warp, lane);
    const typename Shape::WeightTile weight{{stage.weight}};
#pragma unroll
    for (int n = 0; n < kD / 8; n += 2) {
      typename Op::B b[2];
      load_right<Op>(b, weight, warp, 8 * n, lane);
      Op::multiply_add(c[n], a, b[0]);
      Op::multiply_add(c[n + 1], a, b[1]);
    }
  }
  wait_copies<0>();
  __syncthreads();  // every warp is done with the last stage, which the parts replace
  store_part<kD>(shared.scratch.parts[warp], c, 0, lane);
  __syncthreads();  // all parts are written
  store_dout<Op, kD>(p.attention, at, shared);
  __syncthreads();  // dout is in shared memory, and the parts have been read
}

// delta and weight_scale of the tile's rows from the warps' sums.
template <class Shape>
__device__ __forceinline__ void finish_row_sums(const AttentionBackwardParams& p,
                                                const QueryTile& at,
                                                typename Shape::SharedStorage& shared,
                                                uint64_t batch_head) {
  const int row = threadIdx.x, query = at.first_query + row;
  if (row >= Shape::kRows) return;
  float weight = 0.f, gradient = 0.f;
#pragma unroll
  for (int w = 0; w < Shape::kKeyWarps; ++w) {
    weight += shared.weight_sum[w][row];
    gradient += shared.gradient_sum[w][row];
  }
  const bool has_keys = weight > 0.f;
  const int64_t index = batch_head * at.num_tokens + query;
  const bool exists = query < at.num_tokens;
  const float dlse = exists && p.dlse != nullptr ? p.dlse[index] : 0.f;
  const float scale = has_keys ? 1.f / weight : 1.f;
  const float delta = has_keys ? gradient / weight - dlse : 0.f;
  shared.weight_scale[row] = scale;
  shared.delta[row] = delta;
  if (exists) {
    p.weight_scale[index] = scale;
    p.delta[index] = delta;
  }
}

__device__ __forceinline__ float sum_over_quad(float x) {  // the four threads that share a row
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Row sums, then dq, over this warp's chunks of keys. The first chunk is in shared memory.
template <class Op, int kD>
__device__ __forceinline__ void walk_over_keys(
    const AttentionBackwardParams& p, const HeadScores& scores, const QueryTile& at,
    typename BlockQueryShape<Op, kD>::SharedStorage& shared,
    float (&dq)[1][BlockQueryShape<Op, kD>::kOutTiles][4]) {
  using Shape = BlockQueryShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kKeys = Shape::kKeys, kKeyWarps = Shape::kKeyWarps;
  const int warp = threadIdx.x / 32, key_warp = warp % kKeyWarps, column_warp = warp / kKeyWarps;
  auto& chunk_shared = shared.chunks()[key_warp];
  const Tile q_tile{shared.q}, dout_tile{shared.dout}, k_tile{chunk_shared.k},
      v_tile{chunk_shared.v};
  const int end = key_tiles_of_queries(at.first_query, Shape::kRows, kKeys, at.num_tokens,
                                       scores.key_count, scores.is_causal)
                      .end;
  const bool is_kept = end <= kKeyWarps;  // what the first pass found stays in registers

  // Rows g and g + 8. lse is +inf where the row has no key or does not exist: weights become 0.
  float lse[2], weight_scale[2] = {}, delta[2] = {}, weight_sum[2] = {}, gradient_sum[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = at.first_query + threadIdx.x % 32 / 4 + 8 * half;
    const float found = query < at.num_tokens ? p.lse[scores.batch_head * at.num_tokens + query]
                                              : negative_infinity();
    lse[half] = found == negative_infinity() ? -found : found * kScoreUnit<Element>;
  }

  float weights[1][2][4], dweights[1][2][4];
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int chunk = key_warp; chunk < end; chunk += kKeyWarps) {
      const int lane = opaque(threadIdx.x % 32);
      if (pass == 0 || !is_kept) {
        if (pass == 1 || chunk != key_warp) {
          sync_chunk_warps<Shape::kColumnWarps>(key_warp);  // the chunk before has been read
          load_key_chunk<Op, kD>(p, scores, at, chunk_shared, chunk, 32 * column_warp + lane);
          commit_copies();
          wait_copies<0>();
          sync_chunk_warps<Shape::kColumnWarps>(key_warp);  // this chunk is here
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) weights[0][n][i] = dweights[0][n][i] = 0.f;
        }
        multiply_rows<Op, 1, 2, kD>(weights, q_tile, 0, k_tile, lane);
        multiply_rows<Op, 1, 2, kD>(dweights, dout_tile, 0, v_tile, lane);
        const int first_key = chunk * kKeys;
        const bool is_plain = scores.is_plain() && at.first_query + Shape::kRows <= at.num_tokens &&
                              first_key + kKeys <= keys_visible(at.first_query, at.num_tokens,
                                                                scores.key_count, scores.is_causal);
        apply_modifiers<false>(weights[0], scores, at.first_query + lane / 4,
                               first_key + 2 * (lane % 4), is_plain);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            weights[0][n][i] = weight_of<Element>(weights[0][n][i] - lse[i / 2]);
          }
        }
      }
      if (pass == 0) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            weight_sum[i / 2] += weights[0][n][i];
            gradient_sum[i / 2] += weights[0][n][i] * dweights[0][n][i];
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            dweights[0][n][i] =
                weights[0][n][i] * weight_scale[i / 2] * (dweights[0][n][i] - delta[i / 2]);
          }
        }
        multiply_accumulators<Op, 1, 2, Shape::kOutTiles>(dq, dweights, k_tile,
                                                          8 * Shape::kOutTiles * column_warp, lane);
      }
    }
    if (pass == 1) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float weight = sum_over_quad(weight_sum[half]);
      const float gradient = sum_over_quad(gradient_sum[half]);
      const int row = threadIdx.x % 32 / 4 + 8 * half;
      if (threadIdx.x % 4 == 0 && column_warp == 0) {
        shared.weight_sum[key_warp][row] = weight;
        shared.gradient_sum[key_warp][row] = gradient;
      }
    }
    __syncthreads();  // the sums of all warps are written
    finish_row_sums<Shape>(p, at, shared, scores.batch_head);
    if (p.dq.data == nullptr) return;
    __syncthreads();  // delta and weight_scale are written
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % 32 / 4 + 8 * half;
      weight_scale[half] = shared.weight_scale[row];
      delta[half] = shared.delta[row];
    }
  }
}

template <class Op, int kD>
__global__ __launch_bounds__(
    BlockQueryShape<Op, kD>::kThreads,
    kD <= 64 && !Op::kSplits
        ? 2
        : 1) void block_query_gradients_kernel(const __grid_constant__ BlockAttentionBackwardParams
                                                   p) {
  using Shape = BlockQueryShape<Op, kD>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  extern __shared__ __align__(16) char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const AttentionBackwardParams& a = p.attention;
  const QueryTile at(a.sizes);
  const HeadScores scores(a.sizes, a.scores, at.batch, at.head, kScoreUnit<Element>);
  const int thread = threadIdx.x, warp = thread / 32;
  const int key_warp = warp % Shape::kKeyWarps;
  auto query_exists = [&](int row) { return at.first_query + row < at.num_tokens; };
  auto load_heads = [&](Element* tile, const HeadsView& view) {
    load_tile<Shape::kRows, Shape::kThreads>(
        Tile{tile}, head_of<Element>(view, at.batch, at.head) + at.first_query * view.token_stride,
        view.token_stride, a.sizes.head_dim, query_exists);
  };
  auto load_first_keys = [&] {
    if (key_warp * Shape::kKeys >= scores.key_count) return;  // there are none, nor is one read
    load_key_chunk<Op, kD>(a, scores, at, shared.chunks()[key_warp], key_warp,
                           warp / Shape::kKeyWarps * 32 + thread % 32);
  };
  let_next_kernel_start();

  // Copies
  const int num_stages = p.w_out == nullptr ? 0 : ceil_div(p.out_width, Shape::kDepth);
  auto load_stage = [&](int i) {
    if (i < num_stages) {
      load_dout_stage<Op, kD>(p, at, shared.scratch.stages[i % Shape::kStages], i, opaque(thread));
    }
    commit_copies();  // also an empty group, so that counting them is counting stages
  };
  load_heads(shared.q, a.q);
  if (Shape::kEarlyKeys) load_first_keys();
  wait_for_previous_kernel();  // which may have made dout
  if (num_stages == 0) load_heads(shared.dout, a.dout);
  for (int i = 0; i < Shape::kStages - 1; ++i) load_stage(i);

  // Angles, while the copies are under way
  find_tile_angles<Shape::kThreads, kD>(shared.angles, p.q_rotation, at);

  // dout, and the first keys
  if (num_stages > 0) project_dout<Op, kD>(p, at, shared, num_stages, load_stage);
  if (!Shape::kEarlyKeys) {
    load_first_keys();
    commit_copies();
  }
  wait_copies<0>();
  __syncthreads();  // queries, dout and the first keys are here

  float dq[1][Shape::kOutTiles][4] = {};
  walk_over_keys<Op, kD>(a, scores, at, shared, dq);
  if (a.dq.data == nullptr) return;
  __syncthreads();  // every warp is done with its keys, whose place the parts may take
  const int column_warp = warp / Shape::kKeyWarps;
  store_part<kD>(shared.scratch.parts[key_warp], dq[0], 8 * Shape::kOutTiles * column_warp,
                 thread % 32);
  __syncthreads();  // all parts are written
  constexpr int kPartFloats = sizeof(typename Shape::Part) / sizeof(float);
  store_turned_back<Shape::kThreads, kD, Shape::kKeyWarps, kPartFloats>(
      static_cast<Element*>(a.dq.data) + offset_in(a.dq, at.batch, at.first_query, at.head),
      a.dq.token_stride, shared.scratch.parts[0][0], a.scores.scale, a.sizes.head_dim,
      &p.q_rotation, shared.angles, at);
}

template <class Op, int kD>
void launch_block_queries(const BlockAttentionBackwardParams& p, bool is_chained,
                          cudaStream_t stream) {
  using Shape = BlockQueryShape<Op, kD>;
  const AttentionSizes& sizes = p.attention.sizes;
  const int64_t blocks = static_cast<int64_t>(ceil_div(sizes.num_queries, Shape::kRows)) *
                         sizes.num_heads * sizes.batch;
  const auto launch_it = is_chained ? launch_chained<BlockAttentionBackwardParams>
                                    : launch<BlockAttentionBackwardParams>;
  launch_it(block_query_gradients_kernel<Op, kD>, "block_query_gradients", blocks, Shape::kThreads,
            sizeof(typename Shape::SharedStorage), stream, p);
}

}  // namespace frx
