// What the Hopper forward kernel is made of: tile sizes, shared memory, barriers, and which queries
// and keys an item of work covers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "chained_launch.cuh"
#include "mask.cuh"
#include "params.h"
#include "tile_sm90.cuh"

namespace frx {

constexpr int kQueriesPerWarpgroup = 64;

// Word: an element in shared memory; uint16_t for the half types, float for TF32.
template <int kHeadDim_, int kConsumers_, int kTileK_, int kStages_, class Word_ = uint16_t>
struct Sm90ForwardConfig {
  using Word = Word_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kTileQ = kQueriesPerWarpgroup * kConsumers;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  // A single consumer leaves room for a second block on the multiprocessor.
  static constexpr int kBlocksPerSm = kConsumers == 1 ? 2 : 1;

  // A tile lies in shared memory as slabs of at most 128 bytes a token: [slab][token][dim].
  static constexpr int kWideSlab = 128 / sizeof(Word);
  static constexpr int kSlabDims = kHeadDim < kWideSlab ? kHeadDim : kWideSlab;
  static constexpr int kSlabs = kHeadDim / kSlabDims;
  static constexpr int kRowBytes = kSlabDims * sizeof(Word);
  static constexpr uint32_t kSlabBytesQ = kTileQ * kRowBytes;
  static constexpr uint32_t kSlabBytesK = kTileK * kRowBytes;

  // TF32 products want keys contiguous in V: it comes transposed, [slab of keys][dim][key].
  static constexpr bool kValuesTransposed = sizeof(Word) == 4;
  static constexpr int kValueSlabs = kValuesTransposed ? kTileK / kWideSlab : kSlabs;
  static constexpr int kValueRows = kValuesTransposed ? kHeadDim : kTileK;
  static constexpr uint32_t kSlabBytesV = kValueRows * kRowBytes;
  static constexpr uint32_t kLeadingBytesV = kValuesTransposed ? 0 : kSlabBytesV;

  // Registers of a thread that hold the weights of a key tile.
  static constexpr int kWeightRegisters = kTileK * sizeof(Word) / 8;

  // Consumers take turns at the tensor cores, so that one's softmax hides behind another's
  // products. With 256 dims the products are long enough to do so unasked.
  static constexpr bool kTakeTurns = kHeadDim <= 128 && kConsumers > 1;
  // Where the outputs fill half the registers, rescale them while the scores are multiplied, and
  // only when it matters. With fewer dims the test costs more than it saves.
  static constexpr bool kRescaleLazily = kHeadDim > 128;
  // Dropout: Philox calls at a time. Four hide their latencies, two leave registers.
  static constexpr int kDropoutCalls = kHeadDim > 128 ? 2 : 4;

  // Registers a thread. The launch shares them out evenly, setmaxnreg moves them to consumers.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 232 : kConsumers == 2 ? 240 : 160;
  static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <=
                65536 / kBlocksPerSm / (kThreads * 8) * kThreads * 8);

  static_assert(kTileQ <= 256 && kTileK <= 256 && kTileK % 16 == 0);
  static_assert(kSlabBytesK % 1024 == 0 && kSlabBytesV % 1024 == 0,
                "swizzled tiles start at multiples of 1024 bytes");
  static_assert(!kValuesTransposed || (kTileK % kWideSlab == 0 && kSlabDims == kWideSlab));
};

template <class Config>
struct ForwardStorage {
  using Tokens = typename Config::Word[Config::kSlabDims];
  alignas(1024) Tokens q[Config::kSlabs][Config::kTileQ];
  alignas(1024) Tokens k[Config::kStages][Config::kSlabs][Config::kTileK];
  alignas(1024) Tokens v[Config::kStages][Config::kValueSlabs][Config::kValueRows];
  uint64_t q_full, q_empty;
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

struct Sm90ForwardParams {
  CUtensorMap q_map, k_map, v_map;
  AttentionForwardParams attention;
  int num_query_tiles;
  int num_items;
};

enum NamedBarrier : int {
  // 0 is __syncthreads
  kTurn = 1,          // + consumer: its turn at the tensor cores
  kWarpgroupOwn = 4,  // + consumer: its four warps meet
};

// ---- which item -------------------------------------------------------------------------------

struct ForwardItem {
  int batch, head, split;
  int first_query;
  IndexRange key_tiles;
};

// Whether anything that is read may come from the kernel before: in TF32, where that is the
// projection. A pass that transposes values let this kernel start when all else was complete, and
// is waited for before values are read.
template <class Config>
__device__ __forceinline__ bool waits_at_once(const AttentionForwardParams& p) {
  return !Config::kValuesTransposed || p.has_transposed;
}

// Query tiles vary fastest: blocks that run side by side then share K and V in L2. What q, k, v,
// lengths and masks come from may be under way until here, but for a pass over values.
template <class Config>
__device__ __forceinline__ ForwardItem locate_item(const Sm90ForwardParams& params, int index) {
  const AttentionForwardParams& p = params.attention;
  int rest = index / params.num_query_tiles;
  int query_tile = index - rest * params.num_query_tiles;
  // Causal: later queries see more keys; the longest items go first.
  if (p.scores.is_causal) query_tile = params.num_query_tiles - 1 - query_tile;
  ForwardItem item;
  item.first_query = query_tile * Config::kTileQ;
  item.split = 0;
  if (p.num_splits > 1) {
    item.split = rest % p.num_splits;
    rest /= p.num_splits;
  }
  item.batch = rest / p.sizes.num_heads;
  item.head = rest - item.batch * p.sizes.num_heads;
  if (waits_at_once<Config>(p)) wait_for_previous_kernel();
  const int keys = key_count(p.scores.kv_lengths, item.batch, p.sizes.num_keys);
  item.key_tiles = key_tiles_of_queries(item.first_query, Config::kTileQ, Config::kTileK,
                                        p.sizes.num_queries, keys, p.scores.is_causal);
  if (p.num_splits > 1) item.key_tiles = part_of_range(item.key_tiles, item.split, p.num_splits);
  return item;
}

}  // namespace frx
