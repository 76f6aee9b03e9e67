// What the Hopper kernel of dk and dv is made of: tile sizes, shared memory, barriers, which keys
// and queries a block covers, and the producer that brings them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_bwd_turn_sm90.cuh"
#include "chained_launch.cuh"

namespace frx {

// kDk, kDv: which of the two the kernel makes. With 256 dims a thread's registers hold one only.
// kKeepsDs: score gradients are kept, for products that make dk and dq of them. kDq: it also adds
// dq up. With at most 64 dims a third warpgroup does so; with 128, whose
// consumers need its registers, the consumers in turns, a tile each.
template <int kHeadDim_, int kTileQ_, int kStagesQ_, int kStagesDout_, bool kDk_, bool kDv_,
          bool kDq_, bool kKeepsDs_ = false>
struct KeySideConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSlabs = kHeadDim / kSlabDims<kHeadDim>;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kStagesQ = kStagesQ_;
  static constexpr int kStagesDout = kStagesDout_;
  static constexpr bool kDk = kDk_;
  static constexpr bool kDv = kDv_;
  static constexpr bool kDq = kDq_;
  static constexpr bool kKeepsDs = kKeepsDs_;
  static constexpr bool kDs = kDk || kKeepsDs;  // it makes score gradients
  static constexpr bool kHasDqWarpgroup = kDq && kHeadDim <= 64;
  // Tiles of Q and of dO have stages of their own, or, with kStagesDout == 0, alternate in those of
  // Q: which is free as soon as scores are made, where dk does not need it.
  static constexpr bool kAlternates = kStagesDout == 0;
  static constexpr int kStages = kStagesQ + kStagesDout;
  static constexpr int kStagesStatistics = kAlternates ? 2 : kStagesQ;
  static constexpr uint32_t kSlabBytesKeys = kTileRows * kHeadRowBytes<kHeadDim>;
  static constexpr uint32_t kSlabBytesQueries = kTileQ * kHeadRowBytes<kHeadDim>;

  // Registers a thread. The launch shares them out evenly, setmaxnreg moves them to consumers.
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers + (kHasDqWarpgroup ? 1 : 0));
  static constexpr int kMultiplierRegisters = kHasDqWarpgroup ? 200 : kConsumerRegisters;
  static constexpr int kDqRegisters = 88;

  // Where the tile at a position of the walk over the queries is, and the parity of its phase.
  struct Stage {
    uint32_t index, parity;
  };
  static __device__ __forceinline__ Stage q_stage(uint32_t position) {
    if constexpr (kAlternates) position *= 2;
    return {position % kStagesQ, position / kStagesQ & 1};
  }
  static __device__ __forceinline__ Stage dout_stage(uint32_t position) {
    if constexpr (kAlternates) {
      position = 2 * position + 1;
      return {position % kStagesQ, position / kStagesQ & 1};
    } else {
      return {kStagesQ + position % kStagesDout, position / kStagesDout & 1};
    }
  }

  // Dropout serves 16 x 16 corners of the score matrix.
  static_assert(kTileQ % 16 == 0 && kTileQ <= 256);
  static_assert(!kDq || (kDk && kDv && kTileQ == 64));
  static_assert(!kKeepsDs || kTileQ == 64);
  static_assert(!kAlternates || (!kDk && kStagesQ == 3));
};

// What dq is made of and leaves through: score gradients, [tile's parity][consumer's keys][query]
// [key], and for each warp its 16 queries in the order of dq_parts.
template <class Config, bool kDq = Config::kDq>
struct GradientStorage {
  static constexpr int kDqWarps = Config::kHasDqWarpgroup ? 4 : kConsumerWarps;
  alignas(1024) SlabRow ds[2][kConsumers][Config::kTileQ];
  alignas(128) float4 dq[kDqWarps][Config::kHeadDim / 8][32];
  uint64_t ds_full[2], ds_empty[2];  // between consumers and the warpgroup for dq
};

template <class Config>
struct GradientStorage<Config, false> {};

template <class Config>
struct KeySideStorage : GradientStorage<Config> {
  using Row = HeadRow<Config::kHeadDim>;
  // Weights need k alone; their gradients need v too.
  alignas(1024) Row kv[Config::kDs ? 2 : 1][Config::kSlabs][kTileRows];
  alignas(1024) Row tiles[Config::kStages][Config::kSlabs][Config::kTileQ];  // of Q and dO
  alignas(16) float lse_log2[Config::kStagesStatistics][Config::kTileQ];
  alignas(16) float delta[Config::kStagesStatistics][Config::kTileQ];
  uint64_t kv_full;
  uint64_t full[Config::kStages], empty[Config::kStages];  // Q's: with lse and delta
};

// One thread. A full barrier completes by the copy's bytes, an empty one by every warp that reads.
template <class Config>
__device__ __forceinline__ void init_barriers(KeySideStorage<Config>& smem) {
  mbarrier_init(smem.kv_full, Config::kDs ? 2 : 1);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    mbarrier_init(smem.full[stage], stage < Config::kStagesQ ? 2 : 1);  // the copy, statistics
    mbarrier_init(smem.empty[stage], kConsumerWarps);
  }
  if constexpr (Config::kHasDqWarpgroup) {
    for (int parity = 0; parity < 2; ++parity) {
      mbarrier_init(smem.ds_full[parity], kConsumerWarps);
      mbarrier_init(smem.ds_empty[parity], kWarpgroup / 32);
    }
  }
  fence_mbarrier_init();
}

struct KeyItem {
  int block;  // of keys
  int part;   // of the parts of dk and dv; negative: the block is whole
  int64_t batch;
  int kv_head;
  int first_head, end_head;  // the query heads that share the keys
  int first_key;
  IndexRange query_tiles;
};

template <class Config>
using KeySideParams = std::conditional_t<Config::kKeepsDs, Sm90WindowParams, Sm90BackwardParams>;

// A whole block. Key tiles vary fastest: blocks that run side by side then share Q and dO in L2.
// Causal: the first keys are seen by most queries, so the longest blocks start first.
template <class Config>
__device__ __forceinline__ KeyItem locate_block(const AttentionBackwardParams& p, int block) {
  const int num_key_tiles = ceil_div(p.sizes.num_keys, kTileRows);
  const int group = p.sizes.num_heads / p.sizes.num_kv_heads;
  KeyItem item;
  item.block = block;
  item.part = -1;
  const int rest = block / num_key_tiles;
  item.first_key = (block - rest * num_key_tiles) * kTileRows;
  item.batch = rest / p.sizes.num_kv_heads;
  item.kv_head = rest % p.sizes.num_kv_heads;
  item.first_head = item.kv_head * group;
  item.end_head = item.first_head + group;
  const int keys = key_count(p.scores.kv_lengths, item.batch, p.sizes.num_keys);
  item.query_tiles = query_tiles_of_keys(item.first_key, Config::kTileQ, p.sizes.num_queries, keys,
                                         p.scores.is_causal);
  return item;
}

// A piece has its share of the query tiles, of every head.
template <class Config>
__device__ __forceinline__ KeyItem locate_keys(const Sm90BackwardParams& params) {
  const KeyCut& cut = params.attention.key_cut;
  const int index = blockIdx.x;
  const KeyBlock place = key_block_of(cut, index);
  KeyItem item = locate_block<Config>(params.attention, place.block);
  if (is_piece(cut, index)) {
    item.query_tiles = part_of_range(item.query_tiles, place.piece, cut.pieces);
    item.part = index - cut.first_block;
  }
  return item;
}

template <class Config>
__device__ __forceinline__ KeyItem locate_keys(const Sm90WindowParams& params) {
  const WindowCut& cut = params.cut;
  const int beyond = blockIdx.x - cut.whole_blocks, first = params.window.first_block;
  if (beyond < 0) return locate_block<Config>(params.attention, first + blockIdx.x);
  const CutPiece place = params.order.pieces[beyond];
  KeyItem item = locate_block<Config>(params.attention, first + cut.whole_blocks + place.block);
  const IndexRange own = tiles_of_piece(cut.shares, place.block, place.piece);
  item.query_tiles = {larger(item.query_tiles.begin, own.begin),
                      smaller(item.query_tiles.end, own.end)};
  item.part = parts_of_block(cut.shares, place.block).begin + place.piece;
  return item;
}

// One warp: K and V once, then Q, dO and the row statistics tile by tile. All but delta was there
// before the kernel that precedes this one.
template <class Config>
__device__ __forceinline__ void produce_queries(KeySideStorage<Config>& smem,
                                                const Sm90BackwardParams& params,
                                                const KeyItem& item, int lane) {
  const AttentionBackwardParams& p = params.attention;
  if (lane == 0) {
    load_tile(smem.kv[0], params.k_map, smem.kv_full, item.first_key, item.kv_head, item.batch);
    if constexpr (Config::kDs) {
      load_tile(smem.kv[1], params.v_map, smem.kv_full, item.first_key, item.kv_head, item.batch);
    }
  }
  uint32_t position = 0;
  for (int head = item.first_head; head < item.end_head; ++head) {
    const int64_t batch_head = item.batch * p.sizes.num_heads + head;
    for (int tile = item.query_tiles.begin; tile < item.query_tiles.end; ++tile, ++position) {
      const int first_query = tile * Config::kTileQ;
      const auto q_stage = Config::q_stage(position), dout_stage = Config::dout_stage(position);
      const uint32_t statistics = position % Config::kStagesStatistics;
      mbarrier_wait(smem.empty[q_stage.index], q_stage.parity ^ 1);
      if (lane == 0) {
        load_tile(smem.tiles[q_stage.index], params.q_map, smem.full[q_stage.index], first_query,
                  head, item.batch);
      }
      const auto load_dout = [&] {
        mbarrier_wait(smem.empty[dout_stage.index], dout_stage.parity ^ 1);
        if (lane == 0) {
          load_tile(smem.tiles[dout_stage.index], params.dout_map, smem.full[dout_stage.index],
                    first_query, head, item.batch);
          // Where Q was or will be there is an arrival more.
          if (Config::kAlternates) mbarrier_arrive(smem.full[dout_stage.index]);
        }
      };
      // The first dO comes before delta is there. Later ones may wait for room, and statistics,
      // which scores need, must not wait with them.
      if (position == 0) {
        load_dout();
        if (params.follows_delta) wait_for_previous_kernel();
      }
      for (int i = lane; i < Config::kTileQ; i += 32) {
        smem.lse_log2[statistics][i] = row_lse_log2(p, batch_head, first_query + i);
        if constexpr (Config::kDs) {
          smem.delta[statistics][i] = row_delta(p, batch_head, first_query + i);
        }
      }
      __syncwarp();  // every lane's statistics are written
      if (lane == 0) mbarrier_arrive(smem.full[q_stage.index]);
      if (position > 0) load_dout();
    }
  }
}

}  // namespace frx
