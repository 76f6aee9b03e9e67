// dq on Hopper. A block keeps 128 queries of one (batch, head) and walks over a range of key tiles.
// Warpgroup 0 drives the copy engine (Q and dO, then rings of K and V tiles); the other two hold 64
// queries each. Gradients of scores go from accumulators straight into the product that makes dq.
// docs/design/hopper.md has the shared-memory map and the barrier table.
#pragma once

#include <cstdint>

#include "attention_bwd_turn_sm90.cuh"
#include "chained_launch.cuh"
#include "tensor_map.h"

namespace frx {

template <int kHeadDim_, int kTileK_, int kStagesK_, int kStagesV_>
struct QuerySideConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSlabs = kHeadDim / kSlabDims<kHeadDim>;
  static constexpr int kTileK = kTileK_;
  static constexpr int kStagesK = kStagesK_;
  static constexpr int kStagesV = kStagesV_;
  static constexpr uint32_t kSlabBytesQueries = kTileRows * kHeadRowBytes<kHeadDim>;
  static constexpr uint32_t kSlabBytesKeys = kTileK * kHeadRowBytes<kHeadDim>;
  // Dropout serves 16 x 16 corners of the score matrix.
  static_assert(kTileK % 16 == 0 && kTileK <= 256);
};

template <class Config>
struct QuerySideStorage {
  using Row = HeadRow<Config::kHeadDim>;
  alignas(1024) Row q[Config::kSlabs][kTileRows];
  alignas(1024) Row dout[Config::kSlabs][kTileRows];
  alignas(1024) Row k[Config::kStagesK][Config::kSlabs][Config::kTileK];
  alignas(1024) Row v[Config::kStagesV][Config::kSlabs][Config::kTileK];
  uint64_t queries_full;
  uint64_t k_full[Config::kStagesK], k_empty[Config::kStagesK];
  uint64_t v_full[Config::kStagesV], v_empty[Config::kStagesV];
};

struct QueryItem {
  int64_t batch;
  int head, split;
  int first_query;
  IndexRange key_tiles;
};

// Query tiles vary fastest: blocks that run side by side then share K and V in L2.
template <class Config>
__device__ __forceinline__ QueryItem locate_queries(const AttentionBackwardParams& p) {
  const int num_query_tiles = ceil_div(p.sizes.num_queries, kTileRows);
  QueryItem item;
  int rest = blockIdx.x / num_query_tiles;
  int query_tile = blockIdx.x - rest * num_query_tiles;
  // Causal: later queries see more keys; the longest blocks go first.
  if (p.scores.is_causal) query_tile = num_query_tiles - 1 - query_tile;
  item.first_query = query_tile * kTileRows;
  item.split = 0;
  if (p.num_splits > 1) {
    item.split = rest % p.num_splits;
    rest /= p.num_splits;
  }
  item.head = rest % p.sizes.num_heads;
  item.batch = rest / p.sizes.num_heads;
  const int keys = key_count(p.scores.kv_lengths, item.batch, p.sizes.num_keys);
  item.key_tiles = key_tiles_of_queries(item.first_query, kTileRows, Config::kTileK,
                                        p.sizes.num_queries, keys, p.scores.is_causal);
  if (p.num_splits > 1) item.key_tiles = part_of_range(item.key_tiles, item.split, p.num_splits);
  return item;
}

// One thread: Q and dO once, then K and V tile by tile. All of them were there before the kernel
// that precedes this one.
template <class Config>
__device__ __forceinline__ void produce_keys(QuerySideStorage<Config>& smem,
                                             const Sm90BackwardParams& params,
                                             const QueryItem& item) {
  const AttentionSizes& sizes = params.attention.sizes;
  const int kv_head = item.head / (sizes.num_heads / sizes.num_kv_heads);
  load_tile(smem.q, params.q_map, smem.queries_full, item.first_query, item.head, item.batch);
  load_tile(smem.dout, params.dout_map, smem.queries_full, item.first_query, item.head, item.batch);
  for (int tile = item.key_tiles.begin; tile < item.key_tiles.end; ++tile) {
    const uint32_t position = tile - item.key_tiles.begin;
    const uint32_t k_stage = position % Config::kStagesK, v_stage = position % Config::kStagesV;
    mbarrier_wait(smem.k_empty[k_stage], (position / Config::kStagesK & 1) ^ 1);
    load_tile(smem.k[k_stage], params.k_map, smem.k_full[k_stage], tile * Config::kTileK, kv_head,
              item.batch);
    mbarrier_wait(smem.v_empty[v_stage], (position / Config::kStagesV & 1) ^ 1);
    load_tile(smem.v[v_stage], params.v_map, smem.v_full[v_stage], tile * Config::kTileK, kv_head,
              item.batch);
  }
}

// s [64 queries, kTileK keys] of the warpgroup: products become weights, before dropout. (query,
// key) is the thread's first element.
template <bool kModified, int kCount>
__device__ __forceinline__ void weigh_queries(float (&s)[kCount], const HeadScores& scores,
                                              const float (&lse_log2)[2], int query, int key,
                                              bool seen_by_all) {
  if constexpr (kModified) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(scores.score(s[i], query + 8 * (i / 2 % 2), key + 8 * (i / 4) + i % 2) -
                         lse_log2[i / 2 % 2]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scores.scale, -lse_log2[i / 2 % 2]));
    }
    if (!seen_by_all) {
      int visible[2];  // of the keys from `key` on
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        visible[r] =
            keys_visible(query + 8 * r, scores.num_queries, scores.key_count, scores.is_causal) -
            key;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (8 * (i / 4) + i % 2 >= visible[i / 2 % 2]) s[i] = 0;
      }
    }
  }
}

// kModified: a bias, a mask over scores or removed keys.
template <class Config, class Element, bool kDropout, bool kModified>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    attention_backward_queries_sm90_kernel(const __grid_constant__ Sm90BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTileK = Config::kTileK, kHeadDim = Config::kHeadDim;
  constexpr int kStagesK = Config::kStagesK, kStagesV = Config::kStagesV;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<QuerySideStorage<Config>*>(smem_bytes);
  const AttentionBackwardParams& p = params.attention;
  const int block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = block_warp / 4;

  // Barriers: a full one completes by the copy's bytes, an empty one by every consumer warp.
  if (threadIdx.x == 0) {
    mbarrier_init(smem.queries_full, 2);  // Q and dO
    for (int stage = 0; stage < kStagesK; ++stage) {
      mbarrier_init(smem.k_full[stage], 1);
      mbarrier_init(smem.k_empty[stage], kConsumerWarps);
    }
    for (int stage = 0; stage < kStagesV; ++stage) {
      mbarrier_init(smem.v_full[stage], 1);
      mbarrier_init(smem.v_empty[stage], kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(params.q_map);
    prefetch_tensormap(params.k_map);
    prefetch_tensormap(params.v_map);
    prefetch_tensormap(params.dout_map);
  }
  __syncthreads();

  const QueryItem item = locate_queries<Config>(p);
  if (warpgroup == 0) {
    // ---- Producer: one thread keeps the rings of K and V full --------------------------------
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0 && item.key_tiles.begin < item.key_tiles.end) {
      produce_keys(smem, params, item);
    }
  } else {
    // ---- Consumers: 64 queries each ----------------------------------------------------------
    setmaxnreg_inc<kConsumerRegisters>();
    if (params.follows_delta) wait_for_previous_kernel();
    let_next_kernel_start();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % kWarpgroup;
    const int lane = thread % 32, t = lane % 4;
    const int first_row = consumer * kRowsPerConsumer;
    const int warp = block_warp - 4;  // of all consumers'
    const int query = item.first_query + warp * 16 + lane / 4;
    const int query_block = item.first_query / 16 + warp;
    const HeadScores scores(p.sizes, p.scores, item.batch, item.head);
    [[maybe_unused]] const DropoutLane<false> dropout(
        kDropout ? scores.seed() : 0, scores.batch_head, scores.keep_threshold, lane / 4, t);

    const SmemDescriptor q_smem =
        swizzled_descriptor<kHeadRowBytes<kHeadDim>>(smem_address(smem.q[0][first_row]), 0);
    const SmemDescriptor dout_smem = q_smem + sizeof(smem.q);
    const SmemDescriptor k_smem =
        swizzled_descriptor<kHeadRowBytes<kHeadDim>>(smem_address(smem.k), Config::kSlabBytesKeys);
    const SmemDescriptor v_smem =
        swizzled_descriptor<kHeadRowBytes<kHeadDim>>(smem_address(smem.v), 0);

    // Every key of a tile that ends before this is seen by all of the warpgroup's queries.
    const int seen_by_all = keys_visible(item.first_query + first_row, p.sizes.num_queries,
                                         scores.key_count, scores.is_causal);
    float lse_log2[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_log2[r] = row_lse_log2(p, scores.batch_head, query + 8 * r);
      delta[r] = row_delta(p, scores.batch_head, query + 8 * r);
    }

    float dq[kHeadDim / 2] = {};
    if (item.key_tiles.begin < item.key_tiles.end) mbarrier_wait(smem.queries_full, 0);
    for (int tile = item.key_tiles.begin; tile < item.key_tiles.end; ++tile) {
      const uint32_t position = tile - item.key_tiles.begin;
      const int first_key = tile * kTileK;
      const uint32_t k_stage = position % kStagesK, v_stage = position % kStagesV;
      const SmemDescriptor k_tile = k_smem + k_stage * sizeof(smem.k[0]);
      const SmemDescriptor v_tile = v_smem + v_stage * sizeof(smem.v[0]);
      float s[kTileK / 2], ds[kTileK / 2];
      uint32_t gradients[kTileK / 4];

      // s = q k^T and dp = dout v^T
      mbarrier_wait(smem.k_full[k_stage], position / kStagesK & 1);
      // NaN in a key that does not exist must not spread. Both warpgroups write the same zeros, so
      // they need not meet.
      if ((scores.key_count < p.sizes.num_keys && first_key + kTileK > scores.key_count) ||
          (kModified && scores.key_keep != nullptr)) {
        mbarrier_wait(smem.v_full[v_stage], position / kStagesV & 1);
        const auto exists = [&](int i) { return scores.key_exists(first_key + i); };
        clear_absent_rows(smem.k[k_stage], 0, kTileK, thread, exists);
        clear_absent_rows(smem.v[v_stage], 0, kTileK, thread, exists);
        fence_proxy_async();
        named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
      }
      pin_registers(s);
      wgmma_fence();
      multiply_dims<Element, kTileK, kHeadDim>(s, q_smem, Config::kSlabBytesQueries, k_tile,
                                               Config::kSlabBytesKeys);
      wgmma_commit_group();
      mbarrier_wait(smem.v_full[v_stage], position / kStagesV & 1);
      pin_registers(ds);
      wgmma_fence();
      multiply_dims<Element, kTileK, kHeadDim>(ds, dout_smem, Config::kSlabBytesQueries, v_tile,
                                               Config::kSlabBytesKeys);
      wgmma_commit_group();

      // Weights, while dp is multiplied
      [[maybe_unused]] DropoutBits<kTileK> dropped;
      if constexpr (kDropout) dropped.draw(dropout, query_block, first_key / 16);
      wgmma_wait_group<1>();
      pin_registers(s);
      weigh_queries<kModified>(s, scores, lse_log2, query, first_key + 2 * t,
                               first_key + kTileK <= seen_by_all);

      // dq += ds k
      wgmma_wait_group<0>();
      pin_registers(ds);
      if (lane == 0) mbarrier_arrive(smem.v_empty[v_stage]);
#pragma unroll
      for (int i = 0; i < kTileK / 2; ++i) {
        ds[i] = score_gradient<kDropout>(s[i], ds[i], delta[i / 2 % 2],
                                         kDropout && dropped.is_dropped(i / 2, i % 2),
                                         scores.keep_scale);
      }
      pack_weights<Element>(gradients, ds);
      pin_registers(dq);
      pin_registers(gradients);
      wgmma_fence();
      multiply_rows<Element, kHeadDim, kTileK>(dq, gradients, k_tile);
      wgmma_commit_group();
      wgmma_wait_group<0>();
      pin_registers(dq);
      pin_registers(gradients);
      if (lane == 0) mbarrier_arrive(smem.k_empty[k_stage]);
    }

    // The kernel after this one relies on those before it as well.
    wait_for_previous_kernel();
    if (p.num_splits == 1 && p.q_rotation.rotary_dim > 0) {
      named_barrier_sync(kProductsDone, kConsumers * kWarpgroup);
      using Rows = TurningRows<kHeadDim>;
      static_assert(kConsumerWarps * sizeof(Rows) <=
                    sizeof(smem.q) + sizeof(smem.dout) + sizeof(smem.k));
      store_turned_back<Element>(p.dq, dq, p.scores.scale, p.q_rotation, params.turns,
                                 reinterpret_cast<Rows*>(smem_bytes)[warp], item.batch, item.head,
                                 query - lane / 4, p.sizes.num_queries, p.sizes.head_dim, lane);
    } else if (p.num_splits == 1) {
      store_heads<Element>(p.dq, dq, p.scores.scale, item.batch, item.head, query,
                           p.sizes.num_queries, p.sizes.head_dim, t);
    } else if (query - lane / 4 < p.sizes.num_queries) {
      float* out = dq_fragments<kHeadDim>(p, item.split, scores.batch_head, query - lane / 4, lane);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        *reinterpret_cast<float4*>(out + n * kFragment) =
            make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
      }
    }
  }
#else
  __trap();
#endif
}

template <class Config, class Element, bool kDropout, bool kModified>
void launch_backward_queries(const AttentionBackwardParams& p, bool follows_delta,
                             cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  Sm90BackwardParams params;
  params.attention = p;
  params.turns = plan_turns(p.q_rotation);
  params.follows_delta = follows_delta;
  params.q_map = make_heads_map(p.q, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, kTileRows);
  params.dout_map = make_heads_map(p.dout, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                   kSlabDims<Config::kHeadDim>, kTileRows);
  params.k_map = make_heads_map(p.k, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, Config::kTileK);
  params.v_map = make_heads_map(p.v, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, Config::kTileK);
  static_assert(sizeof(QuerySideStorage<Config>) <= kMaxSmemBytes);
  const int64_t blocks = ceil_div(s.num_queries, kTileRows) * s.num_heads * s.batch * p.num_splits;
  launch_chained(attention_backward_queries_sm90_kernel<Config, Element, kDropout, kModified>,
                 "attention_backward_queries_sm90", blocks, kBackwardThreads,
                 sizeof(QuerySideStorage<Config>), stream, params);
}

template <class Config>
void run_backward_queries(const AttentionBackwardParams& p, bool follows_delta,
                          cudaStream_t stream) {
  choose_backward_variant(p, [&](auto element, auto dropout, auto modified) {
    launch_backward_queries<Config, decltype(element), decltype(dropout)::value,
                            decltype(modified)::value>(p, follows_delta, stream);
  });
}

}  // namespace frx
