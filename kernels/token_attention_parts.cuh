// What forward and backward of the attention over tokens share: where a block's keys and rows lie,
// and how a warp gets its columns of them.
//
// A block walks over chunks of 16 keys. Its warps share the columns of x and the heads of k: with
// eight, a warp owns 128 columns and the heads warp, warp + 8, in buffers that no other warp reads:
// copies need no barrier.
#pragma once

#include "mask.cuh"
#include "mma.cuh"
#include "row_copier.cuh"
#include "scores.cuh"
#include "storage.cuh"
#include "tile.cuh"
#include "token_attention.h"

namespace frx {

template <class Op_, int kHeadDim_, int kWarps_>
struct TokenShape {
  using Op = Op_;
  using Element = typename Op::Element;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kWarpColumns = kTokenColumns / kWarps;  // of x, for a warp
  static constexpr int kTokenTiles = kWarpColumns / 8;         // accumulator tiles of these
  static constexpr int kMostHeads = kHeadDim == 128 ? 8 : 16;  // of k
  static constexpr int kHeads = kMostHeads / kWarps;           // for a warp
  static_assert(kMostHeads % kWarps == 0, "all warps have as many heads");
  using KeyTile = SmemTile<Element, kHeadDim>;
  using TokenTile = SmemTile<Element, kWarpColumns>;

  template <int kTokenBuffers>
  struct WarpBuffers {  // while one chunk is worked at, the next arrives
    alignas(128) Element k[2][kHeads][kTokenChunk * kHeadDim];
    alignas(128) Element x[kTokenBuffers][kTokenChunk * kWarpColumns];
  };
};

// Row r of a sample is query r % Tq of head r / Tq.
struct TokenRow {
  int h, query;
};

__device__ __forceinline__ TokenRow token_row(const AttentionSizes& sizes, int row) {
  const int h = row / sizes.num_queries;
  return {h, row - h * sizes.num_queries};
}

// The key head of a row, -1 for rows that do not exist.
__device__ __forceinline__ int key_head_of_row(const AttentionSizes& sizes, int row) {
  const int h = token_row(sizes, row).h;
  return h < sizes.num_heads ? h / (sizes.num_heads / sizes.num_kv_heads) : -1;
}

// How many keys a row sees, key_keep aside; none where the row does not exist.
__device__ __forceinline__ int keys_of_row(const AttentionSizes& sizes, int row, int key_count,
                                           bool is_causal) {
  const TokenRow at = token_row(sizes, row);
  return at.h < sizes.num_heads ? keys_visible(at.query, sizes.num_queries, key_count, is_causal)
                                : 0;
}

// Index of a row among the rows of u [H, B, Tq, Dv].
__device__ __forceinline__ int64_t u_row(const AttentionSizes& sizes, int64_t b, int row) {
  const TokenRow at = token_row(sizes, row);
  return (at.h * sizes.batch + b) * sizes.num_queries + at.query;
}

// Brings a warp's columns of chunks of keys. Keys that do not exist, NaN or not, arrive as zeros.
template <class Shape>
class TokenLoader {
 public:
  using Element = typename Shape::Element;

  __device__ TokenLoader(const TokenAttentionParams& p, int64_t b, int key_count, int warp,
                         int lane)
      : k_(p.k),
        key_copier_(lane),
        token_copier_(lane),
        key_keep_(p.scores.key_keep == nullptr ? nullptr
                                               : p.scores.key_keep + b * p.sizes.num_keys),
        key_count_(key_count),
        warp_(warp),
        num_kv_heads_(p.sizes.num_kv_heads),
        width_(p.width) {
    k_bytes_ =
        static_cast<const char*>(p.k.data) +
        (b * p.k.batch_stride + warp * p.k.head_stride + key_copier_.column()) * sizeof(Element);
    column_ = warp * Shape::kWarpColumns + token_copier_.column();
    x_bytes_ =
        static_cast<const char*>(p.x) +
        (b * p.sizes.num_keys * p.width + (column_ < width_ ? column_ : 0)) * sizeof(Element);
  }

  __device__ __forceinline__ bool key_exists(int key) const {
    return key < key_count_ && (key_keep_ == nullptr || key_keep_[key]);
  }

  // Whether all keys of the chunk that starts there exist.
  __device__ __forceinline__ bool all_exist(int first_key) const {
    return first_key + kTokenChunk <= key_count_ && key_keep_ == nullptr;
  }

  __device__ __forceinline__ void load_keys(
      Element (&k)[Shape::kHeads][kTokenChunk * Shape::kHeadDim], int chunk) const {
#pragma unroll
    for (int i = 0; i < Shape::kHeads; ++i) {
      if (warp_ + i * Shape::kWarps >= num_kv_heads_) break;
      const typename Shape::KeyTile tile{k[i]};
      copy(key_copier_, tile.address(0, 0),
           k_bytes_ + i * Shape::kWarps * k_.head_stride * static_cast<int64_t>(sizeof(Element)),
           k_.token_stride * static_cast<int64_t>(sizeof(Element)), chunk, key_count_);
    }
  }

  __device__ __forceinline__ void load_tokens(Element (&x)[kTokenChunk * Shape::kWarpColumns],
                                              int chunk) const {
    const typename Shape::TokenTile tile{x};
    copy(token_copier_, tile.address(0, 0), x_bytes_,
         width_ * static_cast<int64_t>(sizeof(Element)), chunk, column_ < width_ ? key_count_ : 0);
  }

 private:
  template <class Copier>
  __device__ __forceinline__ void copy(const Copier& copier, uint32_t tile, const char* base,
                                       int64_t token_bytes, int chunk, int limit) const {
    const int first_key = chunk * kTokenChunk, keys = limit - first_key;
    const char* mine = copier.row() < keys ? base + (first_key + copier.row()) * token_bytes : base;
    const int64_t step_bytes = token_bytes * Copier::kRowStep;
    if (key_keep_ == nullptr && keys >= kTokenChunk) {
      copier.copy(tile, mine, step_bytes);
    } else {
      copier.copy(tile, mine, step_bytes, [&](int row) {
        return row < keys && (key_keep_ == nullptr || key_keep_[first_key + row]);
      });
    }
  }

  const HeadsView& k_;  // in constant memory
  RowCopier<typename Shape::KeyTile, kTokenChunk, 32> key_copier_;
  RowCopier<typename Shape::TokenTile, kTokenChunk, 32> token_copier_;
  const char *k_bytes_, *x_bytes_;
  const bool* key_keep_;
  int key_count_, warp_, num_kv_heads_, width_, column_;
};

// All rows of q as one tile, those that do not exist as zeros.
template <class Shape>
__device__ __forceinline__ void load_query_rows(typename Shape::KeyTile tile,
                                                const TokenAttentionParams& p, int64_t b) {
  using Element = typename Shape::Element;
  using Tile = typename Shape::KeyTile;
  for (int i = threadIdx.x; i < kTokenRows * Tile::kChunks; i += Shape::kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const TokenRow at = token_row(p.sizes, row);
    const bool exists = at.h < p.sizes.num_heads;
    const auto* q = static_cast<const Element*>(p.q.data);
    if (exists) q += offset_in(p.q, b, at.query, at.h) + chunk * Tile::kChunkElements;
    copy_async_16(tile.address(row, chunk), q, exists);
  }
}

// Products of the warp's key heads with the rows that look at them: [row][key] of raw scores.
template <class Shape>
__device__ __forceinline__ void multiply_keys(
    float (&raw)[kTokenRows][kTokenChunk + 4],
    typename Shape::Element (&k)[Shape::kHeads][kTokenChunk * Shape::kHeadDim],
    typename Shape::KeyTile q_tile, const int (&key_heads)[2], int warp, int num_kv_heads,
    int lane) {
#pragma unroll
  for (int i = 0; i < Shape::kHeads; ++i) {
    const int head = warp + i * Shape::kWarps;
    if (head >= num_kv_heads) break;
    float s[1][kTokenChunk / 8][4] = {};
    multiply_rows<typename Shape::Op, 1, kTokenChunk / 8, Shape::kHeadDim>(
        s, q_tile, 0, typename Shape::KeyTile{k[i]}, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (key_heads[half] != head) continue;  // the other rows belong to other heads
#pragma unroll
      for (int n = 0; n < kTokenChunk / 8; ++n) {
        store2(&raw[lane / 4 + 8 * half][8 * n + 2 * (lane % 4)], s[0][n][2 * half],
               s[0][n][2 * half + 1]);
      }
    }
  }
}

}  // namespace frx
