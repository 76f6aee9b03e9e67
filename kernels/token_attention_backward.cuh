// Backward of the attention over tokens (sm_80 and newer): dk, dx and parts of dq, from du, the
// gradient of u. With p the weights and ds the gradients of the scores, of 16 rows and a chunk of
// keys, dx = p^T du, dk = ds^T q and dq = ds k.
//
// A block has a part of one sample's keys. Per chunk each warp multiplies its key heads for the
// scores and its columns of x for the gradient of the weights; these meet in shared memory, some
// threads turn one pair of row and key each into p and ds, the others find the chunk's angles, and
// each warp goes on with its columns. There is one block a multiprocessor, hence sixteen warps:
// what is to hide is the latency of short chains of instructions, not that of memory.
#pragma once

#include "chained_launch.cuh"
#include "token_attention_parts.cuh"
#include "turns.cuh"

namespace frx {

// Cosine and sine of each key and pair of a chunk. Four pairs more than there are: neither order of
// reading has bank conflicts then.
template <int kD>
struct TurnTable {
  alignas(16) float2 of[kTokenChunk][kD / 2 + 4];
};

constexpr int kTurnThreads = 256;  // that fill it

// Heads of 128 are eight at most, and leave no registers for more warps.
template <class Op, int kD>
struct TokenBackward : TokenShape<Op, kD, kD == 128 ? 8 : 16> {
  using Shape = TokenShape<Op, kD, kD == 128 ? 8 : 16>;
  using Element = typename Op::Element;
  using PairTile = SmemTile<Element, 16>;
  static constexpr int kPairThreads = kTokenRows * kTokenChunk;  // each has one row and key
  static constexpr int kFirstTurnThread = Shape::kThreads - kTurnThreads;
  static_assert(kPairThreads <= Shape::kThreads && kFirstTurnThread >= 0, "threads for either");

  struct SharedStorage {
    // One buffer of tokens: read before anything else, it is free for most of a chunk's time.
    typename Shape::template WarpBuffers<1> warps[Shape::kWarps];
    // A warp's columns of du, read by that warp alone
    alignas(128) Element du[Shape::kWarps][kTokenRows * Shape::kWarpColumns];
    alignas(128) Element q[kTokenRows * kD];
    alignas(16) float raw[kTokenRows][kTokenChunk + 4];
    // Over each warp's columns; before the first chunk, in its first column, the same of delta
    alignas(16) float dp[Shape::kWarps][kTokenRows][kTokenChunk + 4];
    alignas(128) Element ds[kTokenRows * kTokenChunk];  // [row][key]
    alignas(128) Element ds_transposed[kTokenChunk * kTokenRows];
    alignas(128) Element p_transposed[kTokenChunk * kTokenRows];
    TurnTable<kD> turns;
  };
  static_assert(sizeof(SharedStorage) <= 160 * 1024, "what sm_80 gives a block");
};

// Which of the rows 2t, 2t + 1 (first) and 2t + 8, 2t + 9 look at a key head: a mask over their
// halves of a register. Rows of other heads must not count even where they are NaN.
struct RowMasks {
  uint32_t first, second;
};

__device__ __forceinline__ RowMasks row_masks(const AttentionSizes& sizes, int head, int lane) {
  const int row = 2 * (lane % 4);
  auto mask = [&](int r) {
    return (key_head_of_row(sizes, r) == head ? 0xffffu : 0u) |
           (key_head_of_row(sizes, r + 1) == head ? 0xffff0000u : 0u);
  };
  return {mask(row), mask(row + 8)};
}

// One of the kTurnThreads that fill a table of turns. It has the same pair in every chunk, and asks
// for positions long before it fills the table: loads would take longer than all else between two
// barriers.
template <int kD>
class TurnFinder {
 public:
  __device__ TurnFinder(const TokenAttentionParams& p, int b, int thread)
      : p_(p), b_(b), row_(thread / (kD / 2)), pair_(thread % (kD / 2)) {
    const RotationParams& r = p.k_rotation;
    is_turning_ = thread >= 0 && p.dk != nullptr && 2 * pair_ < r.rotary_dim;
    if (!is_turning_ || r.cos != nullptr) return;
    const int axis_pairs = r.rotary_dim / 2 / r.axes;
    axis_ = pair_ / axis_pairs;
    turns_ = p.k_turns[pair_ - axis_ * axis_pairs];
  }

  __device__ __forceinline__ void find_positions(int first_key) {
    if (!is_turning_ || p_.k_rotation.cos != nullptr) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      positions_[i] = fixed_position_of(p_.k_rotation, b_, key_of(first_key, i), axis_);
    }
  }

  // With the positions found last.
  __device__ __forceinline__ void fill(TurnTable<kD>& table, int first_key) const {
    if (!is_turning_) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float2 turn;
      const RotationParams& r = p_.k_rotation;
      if (r.cos != nullptr) {
        const int64_t at =
            b_ * r.table_batch_stride + key_of(first_key, i) * r.table_token_stride + pair_;
        turn = make_float2(r.cos[at], r.sin[at]);
      } else {
        const CosSin angle = cos_sin_of_turn(fraction_of_turn(positions_[i], turns_));
        turn = make_float2(angle.cos, angle.sin);
      }
      table.of[row_ + i * kRowStep][pair_] = turn;
    }
  }

 private:
  static constexpr int kRowStep = kTurnThreads / (kD / 2), kRows = kTokenChunk / kRowStep;

  __device__ __forceinline__ int key_of(int first_key, int i) const {
    return smaller(first_key + row_ + i * kRowStep, p_.sizes.num_keys - 1);
  }

  const TokenAttentionParams& p_;  // in constant memory
  int b_, row_, pair_, axis_ = 0;
  bool is_turning_;
  uint64_t turns_ = 0;
  FixedPosition positions_[kRows] = {};
};

// A chunk's dk of one head, in accumulators: both members of a pair are the same lane's.
template <int kD>
__device__ __forceinline__ void turn_back(float (&dk)[kD / 8][4], const TurnTable<kD>& table,
                                          const RotationParams& r, int lane) {
  const int pairs = r.rotary_dim / 2;
  if (pairs == 0) return;
  lane = opaque(lane);  // as in store_rows
  auto turn = [&](float& first, float& second, float cosine, float sine) {
    const Pair y = rotate_back({first, second}, cosine, sine);
    first = y.first;
    second = y.second;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    if (r.interleaved) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        const int pair = 4 * n + lane % 4;
        if (pair >= pairs) continue;
        const float2 angle = table.of[row][pair];
        turn(dk[n][2 * half], dk[n][2 * half + 1], angle.x, angle.y);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        const int i = 2 * half;
        const float4 two = *reinterpret_cast<const float4*>(&table.of[row][8 * n + 2 * (lane % 4)]);
        turn(dk[n][i], dk[n + kD / 16][i], two.x, two.y);
        turn(dk[n][i + 1], dk[n + kD / 16][i + 1], two.z, two.w);
      }
    }
  }
}

// 16 rows of accumulators through a buffer of the warp to global memory, 16 bytes a lane. Unless
// all of them exist, rows for which exists() is false are written as zeros, those at and beyond
// num_rows not at all.
template <int kColumns, class Element, class Exists>
__device__ __forceinline__ void store_rows(Element* buffer, const float (&c)[kColumns / 8][4],
                                           float factor, Element* out, int row_stride,
                                           int num_columns, bool all_exist, int num_rows,
                                           Exists exists, int lane) {
  using Tile = SmemTile<Element, kColumns>;
  constexpr int kRowStep = 32 / Tile::kChunks;
  const Tile tile{buffer};
  lane = opaque(lane);  // no registers are left to keep addresses from one chunk to the next
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store2(tile.chunk(lane / 4 + 8 * half, n) + 2 * (lane % 4), c[n][2 * half] * factor,
             c[n][2 * half + 1] * factor);
    }
  }
  __syncwarp();
  constexpr int kPasses = kTokenChunk / kRowStep;
  const int first_row = lane / Tile::kChunks, chunk = lane % Tile::kChunks;
  if (8 * chunk < num_columns) {
    uint4 words[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      words[pass] = *reinterpret_cast<const uint4*>(tile.chunk(first_row + pass * kRowStep, chunk));
    }
    if (!all_exist) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (!exists(first_row + pass * kRowStep)) words[pass] = make_uint4(0, 0, 0, 0);
      }
    }
    Element* const mine = out + first_row * row_stride + 8 * chunk;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (first_row + pass * kRowStep >= num_rows) break;
      *reinterpret_cast<uint4*>(mine + pass * kRowStep * row_stride) = words[pass];
    }
  }
  __syncwarp();  // the buffer may be filled again
}

// delta of the warp's columns: the sum over them of du * u, u with what rounding took from it. With
// this very du, so that the gradients of a row's scores sum to 0 as they must. All loads are under
// way at once, beside the copies of the first chunk.
template <class Shape>
__device__ __forceinline__ void add_up_delta(float (&part)[kTokenRows][kTokenChunk + 4],
                                             const TokenAttentionParams& p, int64_t b, int warp,
                                             int lane) {
  using Element = typename Shape::Element;
  constexpr int kLanes = Shape::kWarpColumns / 8, kRowStep = 32 / kLanes;  // of a row
  const int rows = p.sizes.num_heads * p.sizes.num_queries;
  const int column = warp * Shape::kWarpColumns + lane % kLanes * 8;
#pragma unroll
  for (int pass = 0; pass < kTokenRows / kRowStep; ++pass) {
    const int row = lane / kLanes + pass * kRowStep;
    float sum = 0.f;
    if (row < rows && column < p.width) {
      const int64_t at = u_row(p.sizes, b, row) * p.width + column;
      const auto du = Storage<Element>::template load<8>(p.du, DType(), at);
      const auto u = Storage<Element>::template load<8>(p.u, DType(), at);
      const auto rest = Storage<Element>::template load<8>(p.u_rest, DType(), at);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum = fmaf(to_float(du.elements[i]), to_float(u.elements[i]) + to_float(rest.elements[i]),
                   sum);
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane % kLanes == 0) part[row][0] = sum;
  }
}

// dx = p^T du of the warp's columns, as many at a time as its buffer for a chunk's keys holds.
template <class Shape, class Exists>
__device__ __forceinline__ void store_token_gradients(const TokenAttentionParams& p,
                                                      typename Shape::PairTile p_transposed,
                                                      typename Shape::TokenTile du_tile,
                                                      typename Shape::Element* buffer, int64_t b,
                                                      int first_key, int first_column,
                                                      bool all_exist, Exists exists, int lane) {
  using Op = typename Shape::Op;
  using Element = typename Shape::Element;
  constexpr int kHeld = Shape::kHeads * Shape::kHeadDim;
  constexpr int kColumns = kHeld < Shape::kWarpColumns ? kHeld : Shape::kWarpColumns;
  const typename Op::A a = Op::load_a(p_transposed, 0, 0, lane);
  auto* const out =
      static_cast<Element*>(p.dx) + (b * p.sizes.num_keys + first_key) * p.width + first_column;
#pragma unroll
  for (int first = 0; first < Shape::kWarpColumns; first += kColumns) {
    const int columns = p.width - first_column - first;
    if (columns <= 0) return;
    float dx[kColumns / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      typename Op::B du[2];
      Op::load_b_transposed(du, du_tile, 0, first + 8 * n, lane);
      Op::multiply_add(dx[n], a, du[0]);
      Op::multiply_add(dx[n + 1], a, du[1]);
    }
    store_rows<kColumns>(buffer, dx, 1.f, out + first, p.width, columns, all_exist,
                         p.sizes.num_keys - first_key, exists, lane);
  }
}

template <class Op, int kD>
__global__ __launch_bounds__(TokenBackward<Op, kD>::kThreads, 1) void token_gradients_kernel(
    const __grid_constant__ TokenAttentionParams p) {
  using Shape = TokenBackward<Op, kD>;
  using Element = typename Op::Element;
  constexpr int kHeads = Shape::kHeads, kHeadTiles = kD / 8;
  extern __shared__ char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& mine = shared.warps[warp];
  const typename Shape::KeyTile q_tile{shared.q};
  const typename Shape::TokenTile du_tile{shared.du[warp]};
  const typename Shape::PairTile ds_tile{shared.ds}, ds_transposed{shared.ds_transposed},
      p_transposed{shared.p_transposed};

  const int b = blockIdx.x / p.num_splits, split = blockIdx.x - b * p.num_splits;
  // Also of keys that do not exist: their gradients are zeros.
  const int chunks = ceil_div(p.sizes.num_keys, kTokenChunk);
  const int chunks_a_split = ceil_div(chunks, p.num_splits);
  const int begin = smaller(split * chunks_a_split, chunks);
  const int end = smaller(begin + chunks_a_split, chunks);
  const int rows = p.sizes.num_heads * p.sizes.num_queries;
  const int first_column = warp * Shape::kWarpColumns;
  const int columns = smaller(Shape::kWarpColumns, p.width - first_column);

  wait_for_previous_kernel();
  const int key_count = frx::key_count(p.scores.kv_lengths, b, p.sizes.num_keys);
  const TokenLoader<Shape> loader(p, b, key_count, warp, lane);
  load_query_rows<Shape>(q_tile, p, b);
#pragma unroll
  for (int i = lane; i < kTokenRows * Shape::TokenTile::kChunks; i += 32) {
    const int row = i / Shape::TokenTile::kChunks, chunk = i % Shape::TokenTile::kChunks;
    const bool exists = row < rows && 8 * chunk < columns;
    const auto* du = static_cast<const Element*>(p.du);
    if (exists) du += u_row(p.sizes, b, row) * p.width + first_column + 8 * chunk;
    copy_async_16(du_tile.address(row, chunk), du, exists);
  }
  // Copies come in groups: the first chunk, the second's keys, its tokens, the third's keys and so
  // on. Empty ones count too.
  if (begin < end) {
    loader.load_keys(mine.k[0], begin);
    loader.load_tokens(mine.x[0], begin);
  }
  commit_copies();
  if (begin + 1 < end) loader.load_keys(mine.k[1], begin + 1);
  commit_copies();
  add_up_delta<Shape>(shared.dp[warp], p, b, warp, lane);
  TurnFinder<kD> turns(p, b, static_cast<int>(threadIdx.x) - Shape::kFirstTurnThread);

  // What a chunk needs to know of rows is known once: dividing by the number of queries takes
  // longer than all of a head's products.
  RowMasks masks[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) masks[i] = row_masks(p.sizes, warp + i * Shape::kWarps, lane);
  int key_heads[2];  // of the lane's two rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    key_heads[half] = key_head_of_row(p.sizes, lane / 4 + 8 * half);
  }
  // The row and key of a chunk that one of the first threads has, and what the forward left of it
  const int own_row = threadIdx.x / kTokenChunk % kTokenRows, own_key = threadIdx.x % kTokenChunk;
  const int limit = keys_of_row(p.sizes, own_row, key_count, p.scores.is_causal);
  const float scale = p.scores.scale * kScoreUnit<Element>;
  float lse = -negative_infinity(), dlse = 0.f;
  if (own_row < rows) {
    const float natural = p.lse[int64_t{b} * rows + own_row];
    if (natural != negative_infinity()) {
      lse = natural * kScoreUnit<Element>;
      if (p.dlse != nullptr) dlse = p.dlse[int64_t{b} * rows + own_row];
    }
  }
  wait_copies<1>();
  __syncthreads();  // queries are here, brought by all warps, and all parts of delta
  float delta = -dlse;
#pragma unroll
  for (int w = 0; w < Shape::kWarps; ++w) delta += shared.dp[w][own_row][0];
  __syncthreads();  // they have been read

  float dq[kHeads][1][kHeadTiles][4] = {};
  for (int chunk = begin; chunk < end; ++chunk) {
    const int first_key = chunk * kTokenChunk;
    auto& k = mine.k[(chunk - begin) % 2];
    turns.find_positions(first_key);
    wait_copies<1>();
    __syncwarp();  // the warp's keys and tokens are here

    multiply_keys<Shape>(shared.raw, k, q_tile, key_heads, warp, p.sizes.num_kv_heads, lane);
    {
      float dp[1][kTokenChunk / 8][4] = {};
      if (columns > 0) {
        multiply_rows<Op, 1, kTokenChunk / 8, Shape::kWarpColumns>(
            dp, du_tile, 0, typename Shape::TokenTile{mine.x[0]}, lane);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kTokenChunk / 8; ++n) {
          store2(&shared.dp[warp][lane / 4 + 8 * half][8 * n + 2 * (lane % 4)], dp[0][n][2 * half],
                 dp[0][n][2 * half + 1]);
        }
      }
    }
    __syncwarp();  // the warp's tokens have been read
    if (chunk + 1 < end) loader.load_tokens(mine.x[0], chunk + 1);
    commit_copies();
    __syncthreads();  // products of all heads and columns are here

    if (threadIdx.x < Shape::kPairThreads) {
      const int key = first_key + own_key;
      float weight = 0.f, ds = 0.f;
      if (key < limit && loader.key_exists(key)) {
        float dp = 0.f;
#pragma unroll
        for (int w = 0; w < Shape::kWarps; ++w) dp += shared.dp[w][own_row][own_key];
        weight = weight_of<Element>(shared.raw[own_row][own_key] * scale - lse);
        ds = weight * (dp - delta);
      }
      const Element narrow = from_float<Element>(ds);
      ds_tile.chunk(own_row, own_key / 8)[own_key % 8] = narrow;
      ds_transposed.chunk(own_key, own_row / 8)[own_row % 8] = narrow;
      p_transposed.chunk(own_key, own_row / 8)[own_row % 8] = from_float<Element>(weight);
    }
    turns.fill(shared.turns, first_key);
    __syncthreads();  // p and ds are here, and angles

    auto exists = [&](int row) { return loader.key_exists(first_key + row); };
    const bool all_exist = loader.all_exist(first_key);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = warp + i * Shape::kWarps;
      if (head >= p.sizes.num_kv_heads) break;
      if (p.part_dq != nullptr) {
        const typename Op::A a = Op::load_a(ds_tile, 0, 0, lane);
#pragma unroll
        for (int n = 0; n < kHeadTiles; n += 2) {
          typename Op::B keys[2];
          Op::load_b_transposed(keys, typename Shape::KeyTile{k[i]}, 0, 8 * n, lane);
          Op::multiply_add(dq[i][0][n], a, keys[0]);
          Op::multiply_add(dq[i][0][n + 1], a, keys[1]);
        }
      }
      if (p.dk == nullptr) continue;
      typename Op::A a = Op::load_a(ds_transposed, 0, 0, lane);
      a.r[0] &= masks[i].first;
      a.r[1] &= masks[i].first;
      a.r[2] &= masks[i].second;
      a.r[3] &= masks[i].second;
      float dk[kHeadTiles][4] = {};
#pragma unroll
      for (int n = 0; n < kHeadTiles; n += 2) {
        typename Op::B q[2];
        Op::load_b_transposed(q, q_tile, 0, 8 * n, lane);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          q[j].r[0] &= masks[i].first;
          q[j].r[1] &= masks[i].second;
          Op::multiply_add(dk[n + j], a, q[j]);
        }
      }
      turn_back(dk, shared.turns, p.k_rotation, lane);
      __syncwarp();  // the warp's keys have been read
      auto* out = static_cast<Element*>(p.dk) +
                  ((int64_t{b} * p.sizes.num_keys + first_key) * p.sizes.num_kv_heads + head) * kD;
      store_rows<kD>(k[i], dk, p.scores.scale, out, p.sizes.num_kv_heads * kD, kD, all_exist,
                     p.sizes.num_keys - first_key, exists, lane);
    }
    if (p.dx != nullptr) {
      __syncwarp();  // the warp's keys have been read
      store_token_gradients<Shape>(p, p_transposed, du_tile, k[0], b, first_key, first_column,
                                   all_exist, exists, lane);
    }
    __syncwarp();  // the buffer of keys is free
    if (chunk + 2 < end) loader.load_keys(k, chunk + 2);
    commit_copies();
  }

  // Only now: blocks that wait from the start would take issue slots, and in a profile look busy.
  let_next_kernel_start();
  if (p.part_dq == nullptr) return;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half, head = warp + i * Shape::kWarps;
      if (row >= rows || key_heads[half] != head) continue;
      float* out = p.part_dq + ((split * p.sizes.batch + b) * rows + row) * kD + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        store2(out + 8 * n, dq[i][0][n][2 * half] * p.scores.scale,
               dq[i][0][n][2 * half + 1] * p.scores.scale);
      }
    }
  }
}

constexpr int kSumThreads = 64;  // a block of token_dq: many multiprocessors share the little work

// dq from its parts, always in the same order. A thread has two columns of a row.
template <class Element>
__global__ __launch_bounds__(kSumThreads) void token_dq_kernel(
    const __grid_constant__ TokenAttentionParams p) {
  const int head_dim = p.sizes.head_dim, rows = p.sizes.num_heads * p.sizes.num_queries;
  const int64_t all = p.sizes.batch * rows * head_dim;
  const int64_t at = 2 * (int64_t{blockIdx.x} * kSumThreads + threadIdx.x);
  wait_for_previous_kernel();
  if (at >= all) return;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 16
  for (int split = 0; split < p.num_splits; ++split) {
    const auto part = *reinterpret_cast<const float2*>(p.part_dq + split * all + at);
    sum.x += part.x;
    sum.y += part.y;
  }
  const int64_t sample_row = at / head_dim;
  const int64_t b = sample_row / rows;
  const TokenRow row = token_row(p.sizes, static_cast<int>(sample_row - b * rows));
  const int64_t out = ((b * p.sizes.num_queries + row.query) * p.sizes.num_heads + row.h);
  store2(static_cast<Element*>(p.dq) + out * head_dim + (at - sample_row * head_dim), sum.x, sum.y);
}

template <class Op, int kD>
void launch_token_gradients(const TokenAttentionParams& p, cudaStream_t stream) {
  using Element = typename Op::Element;
  launch_chained(token_gradients_kernel<Op, kD>, "token_gradients", p.sizes.batch * p.num_splits,
                 TokenBackward<Op, kD>::kThreads,
                 sizeof(typename TokenBackward<Op, kD>::SharedStorage), stream, p);
  if (p.part_dq == nullptr) return;
  const int64_t pairs = p.sizes.batch * p.sizes.num_heads * p.sizes.num_queries * (kD / 2);
  launch_chained(token_dq_kernel<Element>, "token_dq", ceil_div(pairs, int64_t{kSumThreads}),
                 kSumThreads, 0, stream, p);
}

template <class Op>
void dispatch_token_gradients(const TokenAttentionParams& p, cudaStream_t stream) {
  switch (p.sizes.head_dim) {
    case 32:
      return launch_token_gradients<Op, 32>(p, stream);
    case 64:
      return launch_token_gradients<Op, 64>(p, stream);
    default:
      return launch_token_gradients<Op, 128>(p, stream);
  }
}

}  // namespace frx
