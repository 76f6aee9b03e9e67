// What the Hopper TF32 backward is made of: tile sizes, shared memory, loads, products, results.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention_bwd_sm90_parts.cuh"
#include "chained_launch.cuh"
#include "mask.cuh"

namespace frx {

template <bool kKeySide_, int kHeadDim_, int kConsumers_, int kTile_, int kStages_,
          int kCopyStages_>
struct Tf32BackwardConfig {
  static constexpr bool kKeySide = kKeySide_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kRows = kRowsPerConsumer * kConsumers;
  static constexpr int kTile = kTile_;
  static constexpr int kStages = kStages_;
  static constexpr int kCopyStages = kCopyStages_;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  // Streamed tensors of which a transposed copy comes along: Q and dO, or K.
  static constexpr int kCopies = kKeySide ? 2 : 1;
  // Dropout serves 16 x 16 corners of the score matrix, a slab is 32 floats wide.
  static_assert(kTile % 32 == 0 && kHeadDim % 32 == 0);
};

using Tf32SlabRow = float[kRowBytes / sizeof(float)];
constexpr int kTf32SlabWidth = sizeof(Tf32SlabRow) / sizeof(float);

template <class Config>
struct Tf32BackwardStorage {
  static constexpr int kDimSlabs = Config::kHeadDim / kTf32SlabWidth;
  // K and V, or Q and dO
  alignas(1024) Tf32SlabRow rows[2][kDimSlabs][Config::kRows];
  // Q and dO, or K and V
  alignas(1024) Tf32SlabRow columns[Config::kStages][2][kDimSlabs][Config::kTile];
  alignas(1024) Tf32SlabRow copies[Config::kCopyStages][Config::kCopies]
                                  [Config::kTile / kTf32SlabWidth][Config::kHeadDim];
  // Where columns are queries
  alignas(16) float lse_log2[Config::kStages][Config::kKeySide ? Config::kTile : 1];
  alignas(16) float delta[Config::kStages][Config::kKeySide ? Config::kTile : 1];
  uint64_t rows_full;
  uint64_t columns_full[Config::kStages], columns_empty[Config::kStages];  // with statistics
  uint64_t copies_full[Config::kCopyStages], copies_empty[Config::kCopyStages];
};

struct Tf32BackwardParams {
  CUtensorMap rows[2], columns[2], copies[2];
  AttentionBackwardParams attention;
  // The kernel before this one in the stream made the copies. Else they are from before that.
  bool follows_copies;
};

struct Tf32BackwardItem {
  int64_t batch;
  int head;                  // of the rows
  int first_head, end_head;  // query heads
  int first_row;
  IndexRange tiles;  // of the other side
};

// Row tiles vary fastest: blocks that run side by side then share the other side in L2. Causal: the
// longest blocks start first.
template <class Config>
__device__ __forceinline__ Tf32BackwardItem locate_rows(const AttentionBackwardParams& p) {
  const AttentionSizes& s = p.sizes;
  const int num_rows = Config::kKeySide ? s.num_keys : s.num_queries;
  const int num_heads = Config::kKeySide ? s.num_kv_heads : s.num_heads;
  const int num_tiles = ceil_div(num_rows, Config::kRows);
  const int rest = blockIdx.x / num_tiles;
  int tile = blockIdx.x - rest * num_tiles;
  if (!Config::kKeySide && p.scores.is_causal) tile = num_tiles - 1 - tile;
  Tf32BackwardItem item;
  item.first_row = tile * Config::kRows;
  item.batch = rest / num_heads;
  item.head = rest % num_heads;
  const int keys = key_count(p.scores.kv_lengths, item.batch, s.num_keys);
  if constexpr (Config::kKeySide) {
    const int group = s.num_heads / s.num_kv_heads;
    item.first_head = item.head * group;
    item.end_head = item.first_head + group;
    item.tiles =
        query_tiles_of_keys(item.first_row, Config::kTile, s.num_queries, keys, p.scores.is_causal);
  } else {
    item.first_head = item.head;
    item.end_head = item.head + 1;
    item.tiles = key_tiles_of_queries(item.first_row, Config::kRows, Config::kTile, s.num_queries,
                                      keys, p.scores.is_causal);
  }
  return item;
}

// ---- loads ------------------------------------------------------------------------------------

// One warp: the rows once, then tile by tile the other side, its copies and, where those are
// queries, their statistics.
template <class Config>
__device__ __forceinline__ void produce_columns(Tf32BackwardStorage<Config>& smem,
                                                const Tf32BackwardParams& params,
                                                const Tf32BackwardItem& item, int lane) {
  const AttentionBackwardParams& p = params.attention;
  if (lane == 0) {
    for (int i = 0; i < 2; ++i) {
      load_tile(smem.rows[i], params.rows[i], smem.rows_full, item.first_row, item.head,
                item.batch);
    }
  }
  const int group = p.sizes.num_heads / p.sizes.num_kv_heads;
  uint32_t position = 0;
  for (int head = item.first_head; head < item.end_head; ++head) {
    const int column_head = Config::kKeySide ? head : head / group;
    for (int tile = item.tiles.begin; tile < item.tiles.end; ++tile, ++position) {
      const int first_column = tile * Config::kTile;
      const uint32_t stage = position % Config::kStages;
      uint64_t& columns_full = smem.columns_full[stage];
      mbarrier_wait(smem.columns_empty[stage], (position / Config::kStages & 1) ^ 1);
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_tile(smem.columns[stage][i], params.columns[i], columns_full, first_column,
                    column_head, item.batch);
        }
      }
      if constexpr (Config::kKeySide) {
        const int64_t batch_head = item.batch * p.sizes.num_heads + head;
        for (int i = lane; i < Config::kTile; i += 32) {
          smem.lse_log2[stage][i] = row_lse_log2(p, batch_head, first_column + i);
          smem.delta[stage][i] = row_delta(p, batch_head, first_column + i);
        }
        __syncwarp();  // every lane's statistics are written
        if (lane == 0) mbarrier_arrive(columns_full);
      }

      if (position == 0 && params.follows_copies) {
        wait_for_previous_kernel();
        let_next_kernel_start();  // it relies on the copies, and on nothing of this kernel
      }
      const uint32_t copy_stage = position % Config::kCopyStages;
      uint64_t& copies_full = smem.copies_full[copy_stage];
      mbarrier_wait(smem.copies_empty[copy_stage], (position / Config::kCopyStages & 1) ^ 1);
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < Config::kCopies; ++i) {
          load_transposed_tile(smem.copies[copy_stage][i], params.copies[i], copies_full,
                               first_column, column_head, item.batch);
        }
      }
    }
  }
}

// ---- products ---------------------------------------------------------------------------------

// d = a b^T: a 64 of kRows rows, b [kColumns, D], both [slab][row][dim] in shared memory.
template <int kColumns, int kHeadDim, int kRows>
__device__ __forceinline__ void multiply_tf32_dims(float (&d)[kColumns / 2], SmemDescriptor a,
                                                   SmemDescriptor b) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 8; ++step) {
    const int slab = step / 4, within = step % 4 * 32;
    Wgmma<Tf32, kColumns>::ss(d, a + (slab * kRows * kRowBytes + within),
                              b + (slab * kColumns * kRowBytes + within), step > 0);
  }
}

// d += a b: a [64, kDepth] accumulators in registers, b [slab of tokens][dim][token], whose tokens
// stand in the order of tf32_key.
template <int kHeadDim, int kDepth>
__device__ __forceinline__ void multiply_tf32_tokens(float (&d)[kHeadDim / 2],
                                                     const uint32_t (&a)[kDepth / 2],
                                                     SmemDescriptor b) {
#pragma unroll
  for (int step = 0; step < kDepth / 8; ++step) {
    Wgmma<Tf32, kHeadDim>::rs(d, a[4 * step], a[4 * step + 2], a[4 * step + 1], a[4 * step + 3],
                              b + (step / 4 * kHeadDim * kRowBytes + step % 4 * 32));
  }
}

// ---- results ----------------------------------------------------------------------------------

// factor * x into rows `row` and `row` + 8 of one head of a [B, T, H, D] view.
template <int kCount>
__device__ __forceinline__ void store_tf32_heads(const HeadsView& view, float (&x)[kCount],
                                                 float factor, int64_t batch, int head, int row,
                                                 int num_rows, int head_dim, int t) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= factor;
  float* out = static_cast<float*>(view.data) + batch * view.batch_stride + head * view.head_stride;
  store_fp32_rows(out, view.token_stride, x, row, num_rows, head_dim, t);
}

}  // namespace frx
