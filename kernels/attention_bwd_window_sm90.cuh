// dk and dq on Hopper, of score gradients that the kernel for dv left in a window
// (gradient_windows.h): two matrix products. A block makes dk of 128 keys, walking over the queries
// of every head that shares them, or adds to dq of 128 queries, walking over the window's keys.
// Warpgroup 0 drives the copy engine (a ring of tiles of Q or K with the gradients that they are
// multiplied by); two hold 64 rows each. docs/design/hopper.md has the barrier table.
#pragma once

#include <cstdint>

#include "attention_bwd_turn_sm90.cuh"
#include "block_cluster.cuh"
#include "chained_launch.cuh"
#include "gradient_windows.h"
#include "tensor_map.h"

namespace frx {

template <int kHeadDim_, int kStages_>
struct WindowConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSlabs = kHeadDim / kSlabDims<kHeadDim>;
  static constexpr int kStages = kStages_;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr uint32_t kSlabBytes = kWindowTile * kHeadRowBytes<kHeadDim>;
};

constexpr int kWindowSteps = kWindowTile / 16;

template <class Config>
struct WindowStorage {
  alignas(1024) HeadRow<Config::kHeadDim> rows[Config::kStages][Config::kSlabs][kWindowTile];
  alignas(128) CoreMatrix gradients[Config::kStages][kConsumers][8][8];  // [keys][queries]
  uint64_t full[Config::kStages], empty[Config::kStages];
};

// What a block makes: dk of a block of keys, or its share of dq of 128 queries of a head. The
// blocks of a cluster have neighbouring rows, and walk over the same tiles also if they need none.
struct WindowItem {
  bool is_dq;
  bool exists;      // it has rows
  bool multiplies;  // and they have gradients
  bool is_first;    // dq: no earlier window has keys of the head
  int64_t batch;
  int head, kv_head;
  int first_row;     // key, or query
  int window_block;  // of keys; dq: the first one of the head, which may lie before the window
  int split;         // dq
  int heads;         // dk: that share the keys
  IndexRange tiles;  // of the other side: queries of each of `heads`, or keys
};

// Blocks for dk come first, then those for dq of the first split, which may be the longest. Query
// tiles vary fastest.
__device__ __forceinline__ WindowItem locate_window_item(const Sm90BackwardParams& params) {
  const AttentionSizes& s = params.attention.sizes;
  const KeyWindow& window = params.window;
  const int group = s.num_heads / s.num_kv_heads;
  const int rank = blockIdx.x % window.cluster;
  const WindowShape shape =
      shape_of_window(s, window.first_block, window.end_block, window.cluster);
  int index = blockIdx.x / window.cluster, kv_head;
  WindowItem item = {};
  item.is_dq = index >= shape.dk_clusters;
  if (item.is_dq) {
    index -= static_cast<int>(shape.dk_clusters);
    int rest = index / shape.query_clusters;
    item.first_row = ((index - rest * shape.query_clusters) * window.cluster + rank) * kTileRows;
    item.head = rest % group;  // of the group, so far
    rest /= group;
    item.split = rest % params.attention.num_splits;
    kv_head = shape.first_head + rest / params.attention.num_splits;
    item.heads = 1;
    item.window_block = kv_head * shape.head_blocks - window.first_block;
  } else {
    index += shape.first_cluster;
    kv_head = index / shape.head_clusters;
    const int first = (index - kv_head * shape.head_clusters) * window.cluster;
    item.first_row = first * kKeysPerBlock;
    item.heads = group;
    item.window_block = kv_head * shape.head_blocks + first + rank - window.first_block;
    item.exists = first + rank < shape.head_blocks && item.window_block >= 0 &&
                  item.window_block < window.end_block - window.first_block;
  }
  item.batch = kv_head / s.num_kv_heads;
  item.kv_head = kv_head % s.num_kv_heads;
  item.head += item.kv_head * group;
  const int keys = key_count(params.attention.scores.kv_lengths, item.batch, s.num_keys);
  if (item.is_dq) {
    item.tiles = split_of_tiles(
        window_tiles(window.first_block, window.end_block, kv_head, s.num_keys, keys), item.split,
        params.attention.num_splits, window.first_split);
    item.exists = item.first_row < s.num_queries;
    item.is_first = item.window_block >= 0;
    item.multiplies = item.exists && item.tiles.begin < item.tiles.end;
  } else {  // of the cluster's first keys: if these have none, no others have
    item.tiles = query_tiles_of_keys(item.first_row, kWindowTile, s.num_queries, keys, false);
    item.first_row += rank * kKeysPerBlock;
    item.multiplies = item.exists && item.first_row < keys;
  }
  return item;
}

// One thread: tile by tile the other side's rows, which were there before the kernel for dv, and
// the gradients, which are its. Each block of a cluster loads its share of the rows into all of
// them.
template <class Config>
__device__ __forceinline__ void produce_window(WindowStorage<Config>& smem,
                                               const Sm90BackwardParams& params,
                                               const WindowItem& item) {
  const AttentionBackwardParams& p = params.attention;
  const int group = p.sizes.num_heads / p.sizes.num_kv_heads;
  const int tiles = item.tiles.end - item.tiles.begin, all = tiles * item.heads;
  const int cluster = params.window.cluster, slabs = Config::kSlabs / cluster;
  const int first_slab = blockIdx.x % cluster * slabs;
  const CUtensorMap& map = item.is_dq ? params.k_map : params.q_map;
  const auto load_rows = [&](int position) {
    const int stage = position % Config::kStages, head = position / tiles;
    const int row = (item.tiles.begin + position - head * tiles) * kWindowTile;
    mbarrier_arrive_expect_tx(smem.full[stage], sizeof(smem.rows[stage]));
    for (int slab = first_slab; slab < first_slab + slabs; ++slab) {
      cp_async_bulk_tensor_4d_multicast(
          smem.rows[stage][slab], map, smem.full[stage], slab * kSlabDims<Config::kHeadDim>, row,
          item.is_dq ? item.kv_head : item.head + head, item.batch, (1 << cluster) - 1);
    }
  };
  const auto load_gradients = [&](int position) {
    const int stage = position % Config::kStages, head = position / tiles;
    const int row = (item.tiles.begin + position - head * tiles) * kWindowTile;
    auto& gradients = smem.gradients[stage];
    if (!item.multiplies) return mbarrier_arrive(smem.full[stage]);
    if (!item.is_dq) {
      mbarrier_arrive_expect_tx(smem.full[stage], sizeof(gradients));
      cp_async_bulk(gradients, gradient_tile(p, item.window_block, head, row), sizeof(gradients),
                    smem.full[stage]);
      return;
    }
    // The same keys of two tiles, of which the last one may be there alone.
    const int block = item.window_block + row / kKeysPerBlock;
    const int rows_left = p.sizes.num_queries - item.first_row;
    const int consumers = smaller(kConsumers, ceil_div(rows_left, kRowsPerConsumer));
    mbarrier_arrive_expect_tx(smem.full[stage], consumers * sizeof(gradients[0]));
    for (int i = 0; i < consumers; ++i) {
      const int query = item.first_row + i * kRowsPerConsumer;
      cp_async_bulk(gradients[i],
                    gradient_tile(p, block, item.head % group, query)[row % kKeysPerBlock / 8],
                    sizeof(gradients[i]), smem.full[stage]);
    }
  };
  const int first = smaller(all, Config::kStages);
  for (int position = 0; position < first; ++position) load_rows(position);
  wait_for_previous_kernel();
  for (int position = 0; position < first; ++position) load_gradients(position);
  for (int position = first; position < all; ++position) {
    mbarrier_wait(smem.empty[position % Config::kStages], (position / Config::kStages & 1) ^ 1);
    load_rows(position);
    load_gradients(position);
  }
}

// A warp is done with the tile at a position, in every block of the cluster.
template <class Config>
__device__ __forceinline__ void release(WindowStorage<Config>& smem, int position, int cluster,
                                        int lane) {
  if (lane < cluster) mbarrier_arrive_in_cluster(smem.empty[position % Config::kStages], lane);
}

// [64 rows, D] of a consumer: gradients, for dq transposed, times the other side's rows.
template <bool kIsDq, class Config, class Element>
__device__ __forceinline__ void multiply_window(float (&x)[Config::kHeadDim / 2],
                                                WindowStorage<Config>& smem,
                                                const Sm90BackwardParams& params,
                                                const WindowItem& item, int consumer, int thread) {
  constexpr uint32_t kQueryBytes = sizeof(CoreMatrix), kKeyBytes = 8 * kQueryBytes;
  const AttentionBackwardParams& p = params.attention;
  const uint32_t address = smem_address(smem.gradients[0][consumer]);
  const SmemDescriptor gradients = kIsDq ? core_descriptor(address, kKeyBytes, kQueryBytes)
                                         : core_descriptor(address, kQueryBytes, kKeyBytes);
  const SmemDescriptor rows = swizzled_descriptor<kHeadRowBytes<Config::kHeadDim>>(
      smem_address(smem.rows), Config::kSlabBytes);
  const int keys = key_count(p.scores.kv_lengths, item.batch, p.sizes.num_keys);
  const int tiles = item.tiles.end - item.tiles.begin, all = tiles * item.heads;
  pin_registers(x);
  for (int position = 0; position < all; ++position) {
    const uint32_t stage = position % Config::kStages;
    mbarrier_wait(smem.full[stage], position / Config::kStages & 1);
    if constexpr (kIsDq) {
      // NaN in a key that does not exist must not spread. Both warpgroups write the same zeros, so
      // they need not meet.
      const int first_key = (item.tiles.begin + position) * kWindowTile;
      if (keys < p.sizes.num_keys && first_key + kWindowTile > keys) {
        clear_absent_rows(smem.rows[stage], 0, kWindowTile, thread,
                          [&](int i) { return first_key + i < keys; });
        fence_proxy_async();
        named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
      }
    }
    const SmemDescriptor tile_gradients = gradients + stage * sizeof(smem.gradients[0]);
    const SmemDescriptor tile_rows = rows + stage * sizeof(smem.rows[0]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWindowSteps; ++step) {
      Wgmma<Element, Config::kHeadDim>::template ss<true, kIsDq>(
          x, tile_gradients + step * 2 * (kIsDq ? kKeyBytes : kQueryBytes),
          tile_rows + step * 16 * kHeadRowBytes<Config::kHeadDim>, true);
    }
    wgmma_commit_group();
    // The products before these are done: their stage is free.
    wgmma_wait_group<1>();
    if (position > 0) release<Config>(smem, position - 1, params.window.cluster, thread % 32);
  }
  wgmma_wait_group<0>();
  pin_registers(x);
  release<Config>(smem, all - 1, params.window.cluster, thread % 32);
}

// The same pace without products: neighbours' rows come and go.
template <class Config>
__device__ __forceinline__ void follow_window(WindowStorage<Config>& smem, const WindowItem& item,
                                              int cluster, int lane) {
  const int all = (item.tiles.end - item.tiles.begin) * item.heads;
  for (int position = 0; position < all; ++position) {
    const uint32_t stage = position % Config::kStages;
    mbarrier_wait(smem.full[stage], position / Config::kStages & 1);
    release<Config>(smem, position, cluster, lane);
  }
}

// A warp's 16 queries into dq_parts, or added to what earlier windows left there.
template <int kCount>
__device__ __forceinline__ void store_dq(float* fragments, const float (&x)[kCount],
                                         bool is_first) {
  constexpr int kBatch = 8;  // pieces under way at a time
#pragma unroll
  for (int first = 0; first < kCount / 4; first += kBatch) {
    float4 sum[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      sum[n] = is_first
                   ? make_float4(0.f, 0.f, 0.f, 0.f)
                   : __ldcg(reinterpret_cast<const float4*>(fragments + (first + n) * kFragment));
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int i = 4 * (first + n);
      *reinterpret_cast<float4*>(fragments + (first + n) * kFragment) = make_float4(
          sum[n].x + x[i], sum[n].y + x[i + 1], sum[n].z + x[i + 2], sum[n].w + x[i + 3]);
    }
  }
}

template <class Config, class Element>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    attention_backward_window_sm90_kernel(const __grid_constant__ Sm90BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kHeadDim = Config::kHeadDim;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<WindowStorage<Config>*>(smem_bytes);
  const AttentionBackwardParams& p = params.attention;
  const int block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = block_warp / 4;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(smem.full[stage], 2);  // rows and gradients
      mbarrier_init(smem.empty[stage], params.window.cluster * kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(params.q_map);
    prefetch_tensormap(params.k_map);
  }
  sync_cluster();  // neighbours' copies arrive at barriers that are there

  const WindowItem item = locate_window_item(params);
  if (warpgroup == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0 && item.tiles.begin < item.tiles.end) {
      produce_window(smem, params, item);
    }
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int consumer = warpgroup - 1, warp = block_warp - 4;  // of all consumers'
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32,
              row = item.first_row + warp * kWarpRows;
    float x[kHeadDim / 2] = {};
    if (!item.multiplies) {
      follow_window(smem, item, params.window.cluster, lane);
    } else if (item.is_dq) {
      multiply_window<true, Config, Element>(x, smem, params, item, consumer, thread);
    } else {
      multiply_window<false, Config, Element>(x, smem, params, item, consumer, thread);
    }

    if (item.is_dq) {
      if (row < p.sizes.num_queries && (item.multiplies || item.is_first)) {
        const int64_t batch_head = item.batch * p.sizes.num_heads + item.head;
        store_dq(dq_fragments<kHeadDim>(p, item.split, batch_head, row, lane), x, item.is_first);
      }
    } else if (item.exists && p.k_rotation.rotary_dim == 0) {
      store_heads<Element>(p.dk, x, p.scores.scale, item.batch, item.kv_head, row + lane / 4,
                           p.sizes.num_keys, p.sizes.head_dim, lane % 4);
    } else if (item.exists) {
      named_barrier_sync(kProductsDone, kConsumers * kWarpgroup);
      using Rows = TurningRows<kHeadDim>;
      static_assert(kConsumerWarps * sizeof(Rows) <= sizeof(smem.rows) + sizeof(smem.gradients));
      store_turned_back<Element>(p.dk, x, p.scores.scale, p.k_rotation, params.turns,
                                 reinterpret_cast<Rows*>(smem_bytes)[warp], item.batch,
                                 item.kv_head, row, p.sizes.num_keys, p.sizes.head_dim, lane);
    }
  }
  sync_cluster();  // no neighbour's copy or arrival is under way
#else
  __trap();
#endif
}

template <class Config>
void run_window_products(const AttentionBackwardParams& p, const KeyWindow& window,
                         cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  Sm90BackwardParams params;
  params.attention = p;
  params.turns = plan_turns(p.k_rotation);
  params.follows_delta = false;
  params.window = window;
  params.q_map = make_heads_map(p.q, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, kWindowTile);
  params.k_map = make_heads_map(p.k, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, kWindowTile);
  static_assert(sizeof(WindowStorage<Config>) <= kMaxSmemBytes);
  auto* const kernel = p.dtype == DType::kBFloat16
                           ? attention_backward_window_sm90_kernel<Config, __nv_bfloat16>
                           : attention_backward_window_sm90_kernel<Config, __half>;
  constexpr const char* kName = "attention_backward_window_sm90";
  params.window.cluster = waits_for_previous_kernel(kernel, kName) ? cluster_of_window(s) : 1;
  const WindowShape shape =
      shape_of_window(s, window.first_block, window.end_block, params.window.cluster);
  const int64_t dq_clusters = int64_t{shape.heads} * (s.num_heads / s.num_kv_heads) *
                              shape.query_clusters * params.attention.num_splits;
  launch_chained(kernel, kName, (shape.dk_clusters + dq_clusters) * params.window.cluster,
                 kBackwardThreads, sizeof(WindowStorage<Config>), stream, params,
                 params.window.cluster);
}

}  // namespace frx
