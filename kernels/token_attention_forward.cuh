// Forward of the attention over tokens, two chained kernels (sm_80 and newer).
//
// token_sums: a block has a part of one sample's keys. Its warps compute the scores of their key
// heads, exchange them through shared memory once a chunk, and each adds p x to its own columns of
// all rows. Parts leave in fp32, relative to the maximum of their keys.
// token_values: a cluster has a head and 16 of its (sample, query) rows; its warps share the depth
// Dv. Each merges the parts of its columns on the way, so that u is never rounded before W_v.
#pragma once

#include "attention_forward.cuh"
#include "block_cluster.cuh"
#include "chained_launch.cuh"
#include "token_attention_parts.cuh"

namespace frx {

template <class Op, int kD>
struct TokenSums : TokenShape<Op, kD, kTokenWarps> {
  using Shape = TokenShape<Op, kD, kTokenWarps>;
  struct SharedStorage {
    typename Shape::template WarpBuffers<2> warps[kTokenWarps];
    alignas(128) typename Op::Element q[kTokenRows * kD];
    // Two: while some warps read one, others write the next.
    alignas(16) float raw[2][kTokenRows][kTokenChunk + 4];
  };
  static_assert(sizeof(SharedStorage) <= 160 * 1024, "what sm_80 gives a block");
  using Softmax = OnlineSoftmax<typename Op::Element, 1, kTokenChunk / 8, Shape::kTokenTiles>;
};

template <class Op, int kD>
__global__ __launch_bounds__(32 * kTokenWarps, 1) void token_sums_kernel(
    const __grid_constant__ TokenAttentionParams p) {
  using Shape = TokenSums<Op, kD>;
  using Element = typename Op::Element;
  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& mine = shared.warps[warp];
  const typename Shape::KeyTile q_tile{shared.q};

  const int64_t b = blockIdx.x / p.num_splits;
  const int split = static_cast<int>(blockIdx.x - b * p.num_splits);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int key_count = frx::key_count(p.scores.kv_lengths, b, p.sizes.num_keys);
  const int chunks = ceil_div(key_count, kTokenChunk);
  const int chunks_a_split = ceil_div(chunks, p.num_splits);
  const int begin = smaller(split * chunks_a_split, chunks);
  const int end = smaller(begin + chunks_a_split, chunks);

  const TokenLoader<Shape> loader(p, b, key_count, warp, lane);
  int key_heads[2], limits[2];  // of the lane's two rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    key_heads[half] = key_head_of_row(p.sizes, row);
    limits[half] = keys_of_row(p.sizes, row, key_count, p.scores.is_causal);
  }
  const float scale = p.scores.scale * kScoreUnit<Element>;

  float o[1][Shape::kTokenTiles][4] = {};
  typename Shape::Softmax softmax;
  if (begin < end) load_query_rows<Shape>(q_tile, p, b);
  // Copies come in groups: keys, then tokens, of one chunk after another. Empty ones count too.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (begin + i < end) loader.load_keys(mine.k[i], begin + i);
    commit_copies();
    if (begin + i < end) loader.load_tokens(mine.x[i], begin + i);
    commit_copies();
  }
  wait_copies<3>();
  __syncthreads();  // queries are here, brought by all warps

  for (int chunk = begin; chunk < end; ++chunk) {
    const int buffer = (chunk - begin) % 2;
    auto& raw = shared.raw[buffer];
    wait_copies<3>();
    __syncwarp();  // the warp's keys are here
    multiply_keys<Shape>(raw, mine.k[buffer], q_tile, key_heads, warp, p.sizes.num_kv_heads, lane);
    __syncwarp();  // they have been read
    if (chunk + 2 < end) loader.load_keys(mine.k[buffer], chunk + 2);
    commit_copies();
    __syncthreads();  // scores of all rows are here; nobody reads those before the last any more

    float s[1][kTokenChunk / 8][4];
#pragma unroll
    for (int n = 0; n < kTokenChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (lane % 4) + i % 2, key = chunk * kTokenChunk + column;
        const bool is_seen = key < limits[i / 2] && loader.key_exists(key);
        s[0][n][i] = is_seen ? raw[lane / 4 + 8 * (i / 2)][column] * scale : negative_infinity();
      }
    }
    softmax.update(s, o);
    wait_copies<3>();
    __syncwarp();  // the warp's tokens are here
    multiply_accumulators<Op, 1, kTokenChunk / 8, Shape::kTokenTiles>(
        o, s, typename Shape::TokenTile{mine.x[buffer]}, 0, lane);
    __syncwarp();  // they have been read
    if (chunk + 2 < end) loader.load_tokens(mine.x[buffer], chunk + 2);
    commit_copies();
  }
  softmax.finish();

  const int rows = p.sizes.num_heads * p.sizes.num_queries;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    if (row >= rows) continue;
    const int64_t part = (split * p.sizes.batch + b) * rows + row;
    if (warp == 0 && lane % 4 == 0) {
      p.part_rows[part] = make_float2(softmax.row_max[0][half], softmax.row_sum[0][half]);
    }
    if (begin >= end) continue;  // a part without keys is not read
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      const int column = warp * Shape::kWarpColumns + 8 * n + 2 * (lane % 4);
      if (column >= p.width) continue;
      store2(p.part_u + part * p.width + column, o[0][n][2 * half], o[0][n][2 * half + 1]);
    }
  }
}

constexpr int kValueSegment = 32;  // of the depth Dv, a warp's step

struct TokenValuesParams {
  TokenAttentionParams attention;
  int ranks;  // blocks of a cluster, which share the depth
};

template <int kD>
struct TokenValuesStorage {
  float weights[kTokenRows][kTokenMostSplits];  // of the parts of a row, which add up to u
  bool has_keys[kTokenRows];
  float warps[kTokenWarps][kTokenRows][kD + 8];   // 32 bytes of padding against bank conflicts
  alignas(16) float2 merged[kTokenRows][kD / 2];  // what a block has, for its cluster
};

// One of the B * Tq rows of a head.
struct ValueRow {
  int64_t part;  // of split 0, counted in rows; the next split is `stride` further
  int64_t stride;
  int64_t out;  // the row of u
  bool exists;

  __device__ ValueRow(const AttentionSizes& sizes, int h, int64_t index) {
    const int64_t tokens = sizes.batch * sizes.num_queries;
    exists = index < tokens;
    if (!exists) index = 0;
    const int64_t b = index / sizes.num_queries;
    const int rows = sizes.num_heads * sizes.num_queries;
    part = b * rows + h * sizes.num_queries + (index - b * sizes.num_queries);
    stride = sizes.batch * rows;
    out = h * tokens + index;
  }
};

// What each part of 16 rows counts, by all threads of the block, 16 a row; lse if this one writes
// it.
template <class Element, int kD>
__device__ __forceinline__ void weigh_parts(TokenValuesStorage<kD>& shared,
                                            const TokenAttentionParams& p, int h, int64_t first,
                                            bool writes_lse) {
  constexpr int kLanes = 32 * kTokenWarps / kTokenRows;
  const int local = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const ValueRow row(p.sizes, h, first + local);
  auto state_of = [&](int split) {
    return row.exists ? p.part_rows[row.part + split * row.stride]
                      : make_float2(negative_infinity(), 0.f);
  };
  float row_max = negative_infinity(), sum = 0.f;
  for (int s = lane; s < p.num_splits; s += kLanes) row_max = fmaxf(row_max, state_of(s).x);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
  }
  for (int s = lane; s < p.num_splits; s += kLanes) {
    const float2 state = state_of(s);
    // Not zero: keys were seen, and NaN must show.
    const float weight = state.y != 0.f ? weight_of<Element>(state.x - row_max) : 0.f;
    shared.weights[local][s] = weight;
    sum = fmaf(weight, state.y, sum);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float factor = sum != 0.f ? 1.f / sum : 0.f;
  for (int s = lane; s < p.num_splits; s += kLanes) shared.weights[local][s] *= factor;
  if (lane != 0) return;
  shared.has_keys[local] = sum != 0.f;
  if (writes_lse && row.exists) {
    p.lse[row.part] = sum != 0.f ? fmaf(row_max, kLn2, logf(sum)) : negative_infinity();
  }
}

// Eight columns of a row of u.
__device__ __forceinline__ void merge_columns(float (&u)[8], const float* weights,
                                              const TokenAttentionParams& p, const ValueRow& row,
                                              int column) {
  constexpr int kBatch = 4;  // parts under way at a time: one would be a chain of latencies
#pragma unroll
  for (int i = 0; i < 8; ++i) u[i] = 0.f;
  if (!row.exists || column >= p.width) return;
  for (int first = 0; first < p.num_splits; first += kBatch) {
    Packed<float, 8> values[kBatch] = {};
    float weight[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int split = first + i;
      weight[i] = split < p.num_splits ? weights[split] : 0.f;
      if (weight[i] == 0.f) continue;  // what a part without keys holds is not read
      values[i] = Storage<float>::load<8>(p.part_u, DType(),
                                          (row.part + split * row.stride) * p.width + column);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int c = 0; c < 8; ++c) u[c] = fmaf(weight[i], values[i].elements[c], u[c]);
    }
  }
}

// u in two parts: rounded, and what rounding took. Lane t of a quad has eight neighbouring columns,
// which serve as depths 2t, 2t + 1, 2t + 8, 2t + 9 of two products: a sum has no order.
template <class Element>
__device__ __forceinline__ void split_u(const float (&u)[8], uint32_t (&head)[4],
                                        uint32_t (&rest)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = u[2 * i], y = u[2 * i + 1];
    head[i] = pack2(x, y, Element());
    rest[i] = pack2(x - to_float(from_float<Element>(x)), y - to_float(from_float<Element>(y)),
                    Element());
  }
}

__device__ __forceinline__ void store_16_bytes(void* base, int64_t byte,
                                               const uint32_t (&words)[4]) {
  *reinterpret_cast<uint4*>(static_cast<char*>(base) + byte) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Op, int kD>
__global__ __launch_bounds__(32 * kTokenWarps, 1) void token_values_kernel(
    const __grid_constant__ TokenValuesParams params) {
  using Element = typename Op::Element;
  const TokenAttentionParams& p = params.attention;
  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<TokenValuesStorage<kD>*>(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % params.ranks;
  const int64_t tile = blockIdx.x / params.ranks;
  const int h = static_cast<int>(tile % p.sizes.num_heads);
  const int64_t first = tile / p.sizes.num_heads * kTokenRows;  // of the B * Tq rows of the head
  const int kv_head = h / (p.sizes.num_heads / p.sizes.num_kv_heads);
  const auto* weight = static_cast<const Element*>(p.w_v) + (int64_t{kv_head} * kD + g) * p.width;
  const int first_column = (rank * kTokenWarps + warp) * kValueSegment + 8 * t;
  const int column_step = params.ranks * kTokenWarps * kValueSegment;

  if (first_column < p.width) {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) prefetch_to_l2(weight + 8 * n * p.width + first_column);
  }
  wait_for_previous_kernel();
  weigh_parts<Element>(shared, p, h, first, rank == 0);
  __syncthreads();  // weights are here
  const ValueRow rows[2] = {{p.sizes, h, first + g}, {p.sizes, h, first + g + 8}};

  float o[kD / 8][4] = {};
  for (int column = first_column; column - 8 * t < p.width; column += column_step) {
    uint32_t head[2][4], rest[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float u[8];
      merge_columns(u, shared.weights[g + 8 * half], p, rows[half], column);
      split_u<Element>(u, head[half], rest[half]);
      if (p.u != nullptr && rows[half].exists && column < p.width) {
        const int64_t byte = (rows[half].out * p.width + column) * sizeof(Element);
        store_16_bytes(p.u, byte, head[half]);
        store_16_bytes(p.u_rest, byte, rest[half]);
      }
    }
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      uint4 w = make_uint4(0, 0, 0, 0);
      if (column < p.width) {
        w = *reinterpret_cast<const uint4*>(weight + 8 * n * p.width + column);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t w0 = step == 0 ? w.x : w.z, w1 = step == 0 ? w.y : w.w;
        const uint32_t a[4] = {head[0][2 * step], head[1][2 * step], head[0][2 * step + 1],
                               head[1][2 * step + 1]};
        const uint32_t a_rest[4] = {rest[0][2 * step], rest[1][2 * step], rest[0][2 * step + 1],
                                    rest[1][2 * step + 1]};
        mma_m16n8k16(o[n], a_rest, w0, w1, Element());
        mma_m16n8k16(o[n], a, w0, w1, Element());
      }
    }
  }

  // The warps' shares of the depth, then the blocks', always in the same order
#pragma unroll
  for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store2(&shared.warps[warp][g + 8 * half][8 * n + 2 * t], o[n][2 * half], o[n][2 * half + 1]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokenRows * kD / 2; i += 32 * kTokenWarps) {
    const int row = i / (kD / 2), pair = i % (kD / 2);
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) {
      sum.x += shared.warps[w][row][2 * pair];
      sum.y += shared.warps[w][row][2 * pair + 1];
    }
    shared.merged[row][pair] = sum;
  }
  if (params.ranks > 1) {
    sync_cluster();  // what all blocks have is written
  } else {
    __syncthreads();
  }
  for (int i = rank * 32 * kTokenWarps + threadIdx.x; i < kTokenRows * kD / 2;
       i += params.ranks * 32 * kTokenWarps) {
    const int row = i / (kD / 2), d = i % (kD / 2) * 2;
    const int64_t index = first + row;
    if (index >= p.sizes.batch * p.sizes.num_queries) continue;
    float2 sum = make_float2(0.f, 0.f);
    for (int peer = 0; peer < params.ranks; ++peer) {
      const float2* place = &shared.merged[row][d / 2];
      const float2 part = params.ranks > 1 ? load_from_peer(place, peer) : *place;
      sum.x += part.x;
      sum.y += part.y;
    }
    // A row without keys has weights that sum to 0, and no bias.
    if (p.b_v != nullptr && shared.has_keys[row]) {
      const auto* bias = static_cast<const Element*>(p.b_v) + kv_head * kD + d;
      sum.x += to_float(bias[0]);
      sum.y += to_float(bias[1]);
    }
    store2(static_cast<Element*>(p.o) + (index * p.sizes.num_heads + h) * kD + d, sum.x, sum.y);
  }
  if (params.ranks > 1) sync_cluster();  // every block has read what it needs of this one
}

template <class Op, int kD>
void launch_token_attention(const TokenAttentionParams& p, cudaStream_t stream) {
  launch_chained(token_sums_kernel<Op, kD>, "token_sums", p.sizes.batch * p.num_splits,
                 32 * kTokenWarps, sizeof(typename TokenSums<Op, kD>::SharedStorage), stream, p);
  auto* kernel = token_values_kernel<Op, kD>;
  TokenValuesParams values{p, 1};
  if (waits_for_previous_kernel(kernel, "token_values")) {
    constexpr int kLargestCluster = 8;
    while (values.ranks < kLargestCluster && values.ranks * kTokenWarps * kValueSegment < p.width) {
      values.ranks *= 2;
    }
  }
  const int64_t tiles =
      p.sizes.num_heads * ceil_div(p.sizes.batch * p.sizes.num_queries, int64_t{kTokenRows});
  launch_chained(kernel, "token_values", tiles * values.ranks, 32 * kTokenWarps,
                 sizeof(TokenValuesStorage<kD>), stream, values, values.ranks);
}

template <class Op>
void dispatch_token_attention(const TokenAttentionParams& p, cudaStream_t stream) {
  switch (p.sizes.head_dim) {
    case 32:
      return launch_token_attention<Op, 32>(p, stream);
    case 64:
      return launch_token_attention<Op, 64>(p, stream);
    default:
      return launch_token_attention<Op, 128>(p, stream);
  }
}

}  // namespace frx
