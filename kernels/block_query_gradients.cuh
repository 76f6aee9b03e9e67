// Query side of a small block's attention backward: dout, the sums of rows, dq.
//
// A block keeps 16 queries of one head. Eight warps share the depth of dout = dy w_out, which no
// other block computes. The keys are spread over eight warps in chunks of 16. Each of them sums
// weights and weight gradients of its chunks, every thread adds up the sums of its rows (see
// attention_row_sums.cuh for why they are not taken from o and lse), and each warp adds its chunks
// to a dq of its own; in the end those meet in shared memory, where the rotation is undone. Up to
// one chunk a warp, nothing is computed twice.
//
// Where no multiprocessor has more than one tile, these are two groups of warps: the weights of the
// first keys, and the angles, are there as soon as dout is. Elsewhere the same warps do both, and
// two blocks share a multiprocessor.
#pragma once

#include "block_backward_parts.cuh"
#include "grouped_gemm.cuh"
#include "scores.cuh"

namespace frx {

// Whether a block may have two groups of warps: bounded by registers and shared memory.
template <class Op, int kD>
constexpr bool kAllowsTwoGroups = kD * sizeof(typename Op::Element) <= 128;

// ProductOp: multiplies what comes from memory, which leaves more ways to split fp32.
template <class Op, class ProductOp, int kD, bool kHasTwoGroups>
struct BlockQueryShape {
  using Element = typename Op::Element;
  using Tile = SmemTile<Element, kD>;
  static constexpr int kHeadDim = kD;
  static constexpr int kGroupThreads = 256, kWarps = kGroupThreads / 32;
  static constexpr int kRows = kBlockBackwardRows;
  static constexpr int kKeys = 16;  // a chunk
  static constexpr int kChunkBytes = 2 * kKeys * kD * sizeof(Element);
  // fp32 outputs of 128 columns leave a thread too few registers: two warps then share a chunk and
  // its columns, each computing the scores for itself.
  static constexpr int kColumnWarps = kChunkBytes > 8 * 1024 ? 2 : 1;
  static constexpr int kKeyWarps = kWarps / kColumnWarps;
  static constexpr int kOutTiles = kD / kColumnWarps / 8;

  // dout = dy w_out: wide heads are spread over two groups of warps, the depth over the rest.
  static constexpr int kDoutColumnWarps = kD * sizeof(Element) > 128 ? 2 : 1;
  static constexpr int kShares = kWarps / kDoutColumnWarps;
  static constexpr int kDoutTiles = kD / kDoutColumnWarps / 8;
  static constexpr int kDepth = (kD == 32 ? 512 : 256) / sizeof(Element);
  static constexpr int kSteps = kDepth / kShares / ProductOp::kK;  // of a warp, a stage
  static_assert(kSteps >= 1, "every warp has a step of a stage");
  using DyTile = SmemTile<Element, kDepth>;
  using WeightTile = DepthTile<Element, kD>;
  struct Stage {
    alignas(16) Element dy[kRows * kDepth];
    alignas(16) Element weight[kDepth * kD];
  };
  static constexpr int kStages = 2;

  using Part = float[kRows][kD + 8];  // 32 bytes of padding: written without bank conflicts
  struct Chunk {
    alignas(16) Element k[kKeys * kD];
    alignas(16) Element v[kKeys * kD];
  };
  // The first keys arrive while dout is computed, where there is room for both.
  static constexpr bool kEarlyKeys = kD * sizeof(Element) <= 128;
  static constexpr bool kTwoGroups = kHasTwoGroups;
  static_assert(!kTwoGroups || kAllowsTwoGroups<Op, kD>, "keys arrive while dout is computed");
  static constexpr int kThreads = kTwoGroups ? 2 * kGroupThreads : kGroupThreads;
  static constexpr int kChunksBytes = kKeyWarps * sizeof(Chunk);
  union Scratch {
    Stage stages[kStages];
    Part parts[kKeyWarps > kShares ? kKeyWarps : kShares];
    char late_chunks[kEarlyKeys ? 1 : kChunksBytes];
  };
  struct SharedStorage {
    alignas(16) Element q[kRows * kD];
    alignas(16) Element dout[kRows * kD];
    TileAngles<kD> angles;
    alignas(16) float2 sums[kRows][kKeyWarps];  // weights, weighted gradients
    alignas(16) Scratch scratch;
    alignas(16) char early_chunks[kEarlyKeys ? kChunksBytes : 1];

    __device__ __forceinline__ Chunk* chunks() {
      return reinterpret_cast<Chunk*>(kEarlyKeys ? early_chunks : scratch.late_chunks);
    }
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "every GPU since sm_80 has it");
};

// A warp's part in the work, and its place among those that share it.
template <class Shape>
struct QueryRole {
  int thread;  // of the group
  bool makes_dout, walks_over_keys;

  __device__ __forceinline__ QueryRole()
      : thread(threadIdx.x % Shape::kGroupThreads),
        makes_dout(!Shape::kTwoGroups || threadIdx.x < Shape::kGroupThreads),
        walks_over_keys(!Shape::kTwoGroups || threadIdx.x >= Shape::kGroupThreads) {}
};

// Barriers of the groups; below are those of the warps that share a chunk.
constexpr int kDoutBarrier = 14, kKeysBarrier = 15;

template <class Shape>
__device__ __forceinline__ void sync_group(int barrier) {
  if constexpr (Shape::kTwoGroups) {
    sync_threads(barrier, Shape::kGroupThreads);
  } else {
    __syncthreads();
  }
}

// Where a block's tile lies, and whose keys it sees.
struct QueryTile : HeadTile {
  int batch_head;
  int kv_head;
  int first_query;

  __device__ __forceinline__ QueryTile(const BlockAttentionBackwardParams& p, int tile) {
    batch_head = quotient(tile, p.query_tiles);
    first_query = first_token = (tile - batch_head * p.query_tiles.value) * kBlockBackwardRows;
    num_tokens = p.attention.sizes.num_queries;
    batch = quotient(batch_head, p.heads);
    head = batch_head - batch * p.heads.value;
    kv_head = quotient(head, p.heads_a_kv_head);
  }
};

// lse of a thread's rows g and g + 8, in units; +inf where the row has no key or does not exist:
// weights become 0.
struct QueryRows {
  float lse[2];
};

// Not in units yet, and -inf.
__device__ __forceinline__ QueryRows load_query_rows(const AttentionBackwardParams& p,
                                                     const QueryTile& at) {
  const float* lse_of_head = p.lse + static_cast<int64_t>(at.batch_head) * at.num_tokens;
  QueryRows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = at.first_query + threadIdx.x % 32 / 4 + 8 * half;
    rows.lse[half] = query < at.num_tokens ? lse_of_head[query] : negative_infinity();
  }
  return rows;
}

// Apart from the load, which is under way while other things are worked out.
template <class Element>
__device__ __forceinline__ QueryRows in_units(const QueryRows& rows) {
  QueryRows scaled;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float lse = rows.lse[half];
    scaled.lse[half] = lse == negative_infinity() ? -lse : lse * kScoreUnit<Element>;
  }
  return scaled;
}

// The tile of dout from the warps' shares: rounded, to shared memory and for the key side to
// global.
template <class Shape>
__device__ __forceinline__ void store_dout(const AttentionBackwardParams& p, const QueryTile& at,
                                           typename Shape::SharedStorage& shared) {
  using Element = typename Shape::Element;
  using Tile = typename Shape::Tile;
  constexpr int kPairs = Shape::Tile::kChunks * Tile::kChunkElements / 2;
  constexpr int kRowStep = Shape::kGroupThreads / kPairs;
  const Tile tile{shared.dout};
  const int d = threadIdx.x % kPairs * 2, first = threadIdx.x / kPairs;
  Element* out = static_cast<Element*>(p.dout.data) +
                 offset_in(p.dout, at.batch, at.first_query + first, at.head) + d;
#pragma unroll
  for (int i = 0; i < Shape::kRows / kRowStep; ++i) {
    const int row = first + i * kRowStep;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int share = 0; share < Shape::kShares; ++share) {
      const float2 both = *reinterpret_cast<const float2*>(&shared.scratch.parts[share][row][d]);
      x += both.x;
      y += both.y;
    }
    store2(tile.chunk(row, d / Tile::kChunkElements) + d % Tile::kChunkElements, x, y);
    if (at.first_query + row < at.num_tokens && d < p.sizes.head_dim) {
      store2(out + i * kRowStep * p.dout.token_stride, x, y);
    }
  }
}

// dout = dy w_out of the tile, each warp a share of the depth. The first stages are under way.
template <class ProductOp, class Shape, class Load>
__device__ __forceinline__ void project_dout(const AttentionBackwardParams& p, const QueryTile& at,
                                             typename Shape::SharedStorage& shared, int num_stages,
                                             Load load) {
  constexpr int kTiles = Shape::kDoutTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = warp % Shape::kShares, first_column = warp / Shape::kShares * 8 * kTiles;
  float c[kTiles][4] = {};
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    wait_copies<Shape::kStages - 1>();
    sync_group<Shape>(kDoutBarrier);  // stage i is here
    auto& stage = shared.scratch.stages[slot];
    const typename Shape::DyTile dy{stage.dy};
    const typename Shape::WeightTile weight{{stage.weight}};
#pragma unroll(ProductOp::kSplits ? 1 : Shape::kSteps)
    for (int step = 0; step < Shape::kSteps; ++step) {
      const int k = share * Shape::kSteps + step;
      const typename ProductOp::A a = ProductOp::load_a(dy, 0, k, lane);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        typename ProductOp::B b[2];
        load_right<ProductOp>(b, weight, k, first_column + 8 * n, lane);
        ProductOp::multiply_add(c[n], a, b[0]);
        ProductOp::multiply_add(c[n + 1], a, b[1]);
      }
    }
    if (i + Shape::kStages < num_stages) {
      sync_group<Shape>(kDoutBarrier);  // every warp is done with this stage
    }
    load(i + Shape::kStages, slot);
    slot = slot + 1 < Shape::kStages ? slot + 1 : 0;
  }
  sync_group<Shape>(kDoutBarrier);  // every warp is done with the last stage: shares replace it
  store_part<Shape::kHeadDim>(shared.scratch.parts[share], c, first_column, lane);
  sync_group<Shape>(kDoutBarrier);  // all shares are written
  store_dout<Shape>(p, at, shared);
}

__device__ __forceinline__ float sum_over_quad(float x) {  // the four threads that share a row
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ void clear(float (&c)[1][2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[0][n][i] = 0.f;
  }
}

// Weights of one chunk, not yet divided by their row's sum.
template <class Op, class Shape>
__device__ __forceinline__ void weigh_chunk(const HeadScores& scores, const QueryTile& at,
                                            typename Shape::SharedStorage& shared,
                                            typename Shape::Chunk& chunk_shared, int chunk,
                                            int lane, const QueryRows& rows,
                                            float (&weights)[1][2][4]) {
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  clear(weights);
  multiply_rows<Op, 1, 2, Shape::kHeadDim>(weights, Tile{shared.q}, 0, Tile{chunk_shared.k}, lane);
  const int first_key = chunk * Shape::kKeys;
  const bool is_plain =
      scores.is_plain() && at.first_query + Shape::kRows <= at.num_tokens &&
      first_key + Shape::kKeys <=
          keys_visible(at.first_query, at.num_tokens, scores.key_count, scores.is_causal);
  apply_modifiers<false>(weights[0], scores, at.first_query + lane / 4, first_key + 2 * (lane % 4),
                         is_plain);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[0][n][i] = weight_of<Element>(weights[0][n][i] - rows.lse[i / 2]);
    }
  }
}

// Row sums, then dq, over this warp's chunks of keys. Queries and the first chunk are in shared
// memory; dout is behind a barrier of the block where others make it.
template <class Op, class Shape, class Load>
__device__ __forceinline__ void walk_over_keys(const BlockAttentionBackwardParams& block,
                                               const HeadScores& scores, const QueryTile& at,
                                               typename Shape::SharedStorage& shared, int warp,
                                               const QueryRows& rows, Load load_keys,
                                               float (&dq)[1][Shape::kOutTiles][4]) {
  using Tile = typename Shape::Tile;
  constexpr int kKeyWarps = Shape::kKeyWarps;
  const AttentionBackwardParams& p = block.attention;
  const int key_warp = warp % kKeyWarps, column_warp = warp / kKeyWarps;
  auto& chunk_shared = shared.chunks()[key_warp];
  const int end = key_tiles_of_queries(at.first_query, Shape::kRows, Shape::kKeys, at.num_tokens,
                                       scores.key_count, scores.is_causal)
                      .end;
  const bool is_kept = end <= kKeyWarps;  // what the first pass found stays in registers
  auto await_dout = [] {
    if (Shape::kTwoGroups) __syncthreads();
  };
  float weight_scale[2] = {}, delta[2] = {}, dlse[2] = {};
  float weight_sum[2] = {}, gradient_sum[2] = {};
  float weights[1][2][4], dweights[1][2][4];
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int chunk = key_warp; chunk < end; chunk += kKeyWarps) {
      const int lane = opaque(threadIdx.x % 32);
      if (pass == 0 || !is_kept) {
        if (pass == 1 || chunk != key_warp) {
          sync_chunk_warps<Shape::kColumnWarps>(key_warp);  // the chunk before has been read
          load_keys(chunk);
          commit_copies();
          wait_copies<0>();
          sync_chunk_warps<Shape::kColumnWarps>(key_warp);  // this chunk is here
        }
        weigh_chunk<Op, Shape>(scores, at, shared, chunk_shared, chunk, lane, rows, weights);
        if (pass == 0 && chunk == key_warp) await_dout();
        clear(dweights);
        multiply_rows<Op, 1, 2, Shape::kHeadDim>(dweights, Tile{shared.dout}, 0,
                                                 Tile{chunk_shared.v}, lane);
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
            dweights[0][n][i] = weights[0][n][i] * weight_scale[i / 2] *
                                ((dweights[0][n][i] - delta[i / 2]) + dlse[i / 2]);
          }
        }
        multiply_accumulators<Op, 1, 2, Shape::kOutTiles>(dq, dweights,
                                                          typename Shape::Tile{chunk_shared.k},
                                                          8 * Shape::kOutTiles * column_warp, lane);
      }
    }
    if (pass == 1) return;
    if (key_warp >= end) await_dout();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float weight = sum_over_quad(weight_sum[half]);
      const float gradient = sum_over_quad(gradient_sum[half]);
      const int row = threadIdx.x % 32 / 4 + 8 * half;
      if (threadIdx.x % 4 == 0 && column_warp == 0) {
        shared.sums[row][key_warp] = make_float2(weight, gradient);
      }
    }
    sync_group<Shape>(kKeysBarrier);                // the sums of all warps are written
    const QueryTile to(block, opaque(blockIdx.x));  // found again instead of kept in registers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % 32 / 4 + 8 * half, query = to.first_query + row;
      float weight = 0.f, gradient = 0.f;
#pragma unroll
      for (int w = 0; w < kKeyWarps; w += 2) {
        const float4 two = *reinterpret_cast<const float4*>(&shared.sums[row][w]);
        weight = weight + two.x + two.z;
        gradient = gradient + two.y + two.w;
      }
      const bool has_keys = weight > 0.f;
      const int64_t index = static_cast<int64_t>(to.batch_head) * to.num_tokens + query;
      dlse[half] = has_keys && p.dlse != nullptr && query < to.num_tokens ? p.dlse[index] : 0.f;
      weight_scale[half] = has_keys ? 1.f / weight : 1.f;
      // To the bit, where a row has a single key; what that saves is lost in the rounding of 16-bit
      // gradients of scores.
      constexpr bool kIsExact = sizeof(typename Op::Element) == 4;
      delta[half] = !has_keys ? 0.f : kIsExact ? gradient / weight : gradient * weight_scale[half];
      // Added to a difference that is exactly 0 there
      if (!kIsExact) {
        delta[half] -= dlse[half];
        dlse[half] = 0.f;
      }
      if (warp == 0 && threadIdx.x % 4 == 0 && query < to.num_tokens) {
        block.row_terms[index] = {rows.lse[half], weight_scale[half], delta[half], dlse[half]};
      }
    }
    if (p.dq.data == nullptr) return;
  }
}

// Blocks that share a multiprocessor, bounded by registers.
template <class Op, int kD, bool kHasTwoGroups>
constexpr int kQueryBlocks = kD <= 64 && !Op::kSplits && !kHasTwoGroups ? 2 : 1;

template <class Op, class ProductOp, int kD, bool kHasTwoGroups>
__global__ __launch_bounds__(BlockQueryShape<Op, ProductOp, kD, kHasTwoGroups>::kThreads,
                             kQueryBlocks<Op, kD, kHasTwoGroups>) void  //
    block_query_gradients_kernel(const __grid_constant__ BlockQueryParams params) {
  using Shape = BlockQueryShape<Op, ProductOp, kD, kHasTwoGroups>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  extern __shared__ __align__(16) char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const BlockAttentionBackwardParams& p = params.attention;
  const AttentionBackwardParams& a = p.attention;
  const QueryTile at(p, blockIdx.x);
  // What can be worked out without reading comes first. HeadScores reads lengths.
  if (!params.follows_kernel && a.scores.kv_lengths != nullptr) wait_for_previous_kernel();
  const HeadScores scores(a.sizes, a.scores, at.batch, at.head, kScoreUnit<Element>);
  const QueryRole<Shape> role;
  const int thread = role.thread, warp = thread / 32;
  const int key_warp = warp % Shape::kKeyWarps, column_warp = warp / Shape::kKeyWarps;
  const int head_dim = a.sizes.head_dim;

  // Copies
  using QueryCopier = HeadCopier<Tile, Shape::kGroupThreads, Element>;
  const QueryCopier q_copier(a.q, at.batch, at.head, head_dim, at.num_tokens, thread);
  constexpr int kSharers = 32 * Shape::kColumnWarps;
  using KeyCopier = HeadCopier<Tile, kSharers, Element>;
  auto key_copier = [&](const HeadsView& view) {
    const int sharer = 32 * column_warp + opaque(thread % 32);
    return KeyCopier(view, at.batch, at.kv_head, head_dim, scores.key_count, sharer);
  };
  auto copy_keys = [&](const KeyCopier& k_copier, const KeyCopier& v_copier, int chunk) {
    auto& to = shared.chunks()[key_warp];
    const int first_key = chunk * Shape::kKeys;
    if (scores.key_keep == nullptr) {
      k_copier.copy(shared_address(to.k), first_key);
      v_copier.copy(shared_address(to.v), first_key);
    } else {
      auto exists = [&](int key) { return scores.key_keep[key]; };
      k_copier.copy_rows(shared_address(to.k), first_key, exists);
      v_copier.copy_rows(shared_address(to.v), first_key, exists);
    }
  };
  auto load_keys = [&](int chunk) { copy_keys(key_copier(a.k), key_copier(a.v), chunk); };
  const int num_stages = p.w_out == nullptr ? 0 : ceil_div(p.out_width, Shape::kDepth);
  const int inner = a.sizes.num_heads * head_dim;
  const bool is_deep = p.out_width % Shape::kDepth == 0;
  const bool is_dy_whole = is_deep && at.first_query + Shape::kRows <= at.num_tokens;
  const bool is_weight_whole = is_deep && head_dim == kD;
  const StageCopier<typename Shape::DyTile, Shape::kRows, Shape::kGroupThreads> dy_copier(
      static_cast<const Element*>(p.dy) +
          static_cast<int64_t>(at.batch) * at.num_tokens * p.out_width,
      at.first_query, at.num_tokens, p.out_width, thread);
  const DepthCopier<typename Shape::WeightTile, Shape::kDepth, Shape::kGroupThreads> weight_copier(
      static_cast<const Element*>(p.w_out) + at.head * head_dim, p.out_width, inner, head_dim,
      thread);
  auto load_stage = [&](int i, int slot) {
    if (i < num_stages && role.makes_dout) {
      auto& stage = shared.scratch.stages[slot];
      dy_copier.copy(shared_address(stage.dy), i * Shape::kDepth, is_dy_whole);
      weight_copier.copy(shared_address(stage.weight), i * Shape::kDepth, is_weight_whole);
    }
    commit_copies();  // also an empty group, so that counting them is counting stages
  };
  const KeyCopier k_copier = key_copier(a.k), v_copier = key_copier(a.v);
  const uint64_t turns = load_tile_turns<Shape::kGroupThreads, kD>(p.q_rotation);
  // Arguments may be read once what precedes the call is complete, dout once its kernel is
  if (!params.follows_kernel || num_stages == 0) wait_for_previous_kernel();
  load_stage(0, 0);
  if (role.walks_over_keys) {
    if (num_stages == 0) {
      const QueryCopier dout_copier(a.dout, at.batch, at.head, head_dim, at.num_tokens, thread);
      dout_copier.copy(shared_address(shared.dout), at.first_query);
    }
    q_copier.copy(shared_address(shared.q), at.first_query);
    if (Shape::kEarlyKeys) copy_keys(k_copier, v_copier, key_warp);
  }
#pragma unroll
  for (int i = 1; i < Shape::kStages; ++i) load_stage(i, i);
  let_next_kernel_start();
  wait_for_previous_kernel();

  // Angles and what is known of the rows, while the copies are under way
  const QueryRows loaded_rows = load_query_rows(a, at);
  auto find_angles = [&] {
    find_tile_angles<Shape::kGroupThreads, kD>(shared.angles, p.q_rotation, turns, at);
  };
  if (!Shape::kTwoGroups) find_angles();

  // dout, and the first keys
  if (role.makes_dout && num_stages > 0) {
    project_dout<ProductOp, Shape>(a, at, shared, num_stages, load_stage);
  }
  if (!Shape::kEarlyKeys) {
    __syncthreads();  // the shares of dout have been read
    load_keys(key_warp);
    commit_copies();
  }
  if (role.walks_over_keys) {
    const QueryRows rows = in_units<Element>(loaded_rows);
    wait_copies<0>();
    sync_group<Shape>(kKeysBarrier);  // queries, first keys and, of the same warps, dout are here
    float dq[1][Shape::kOutTiles][4] = {};
    walk_over_keys<Op, Shape>(p, scores, at, shared, warp, rows, load_keys, dq);
    if (a.dq.data == nullptr) return;
    if (!Shape::kEarlyKeys) __syncthreads();  // every warp is done with its keys, where parts go
    store_part<kD>(shared.scratch.parts[key_warp], dq[0], 8 * Shape::kOutTiles * column_warp,
                   thread % 32);
  } else {
    __syncthreads();  // dout is here
    if (a.dq.data == nullptr) return;
    find_angles();
  }
  // Found behind the keys: in front of them, registers are short
  const QueryTile to(p, opaque(blockIdx.x));
  const GradientPlace<Shape::kGroupThreads, kD, Element> place(a.dq, head_dim, &p.q_rotation, to,
                                                               thread);
  __syncthreads();  // all parts are written
  if (!role.makes_dout) return;
  constexpr int kPartFloats = sizeof(typename Shape::Part) / sizeof(float);
  store_turned_back<Shape::kKeyWarps, kPartFloats>(place, a.dq.token_stride,
                                                   shared.scratch.parts[0][0], a.scores.scale,
                                                   &p.q_rotation, shared.angles, to);
}

}  // namespace frx
