// Softmax attention forward on Hopper. A block works through items: kTileQ queries of one (batch,
// head) against a range of key tiles. Warpgroup 0 drives the copy engine (Q, and rings of K and V
// tiles); each other warpgroup multiplies 64 of the queries with everything. Scores, weights and
// outputs stay in registers; shared memory holds Q, K and V only. docs/design/hopper.md has the
// shared-memory map and the barrier table.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_fwd_sm90_items.cuh"
#include "attention_fwd_sm90_parts.cuh"
#include "attention_sm90.h"
#include "chained_launch.cuh"
#include "dropout_bits.cuh"
#include "mask.cuh"
#include "ptx_sm90.cuh"
#include "scores.cuh"
#include "softmax_sm90.cuh"
#include "tensor_map.h"
#include "tile_sm90.cuh"
#include "transpose_heads_sm90.h"
#include "wgmma_sm90.cuh"

namespace frx {

// ---- the kernel -------------------------------------------------------------------------------

// kDropout: weights are dropped. kModified: there is a bias, a mask over scores, removed keys or a
// scale that is not positive; such scores are computed one by one.
template <class Config, class Element, bool kDropout, bool kModified>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    attention_forward_sm90_kernel(const __grid_constant__ Sm90ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kStages = Config::kStages;
  [[maybe_unused]] constexpr bool kTf32 = std::is_same_v<Element, Tf32>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<ForwardStorage<Config>*>(smem_bytes);
  const AttentionForwardParams& p = params.attention;
  const int block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = block_warp / 4;

  // Barriers: a full one completes by the copy's bytes, an empty one by every consumer warp.
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    mbarrier_init(smem.q_full, 1);
    mbarrier_init(smem.q_empty, kConsumerWarps);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(smem.k_full[stage], 1);
      mbarrier_init(smem.k_empty[stage], kConsumerWarps);
      mbarrier_init(smem.v_full[stage], 1);
      mbarrier_init(smem.v_empty[stage], kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(params.q_map);
    prefetch_tensormap(params.k_map);
    prefetch_tensormap(params.v_map);
  }
  __syncthreads();

  if (warpgroup == 0) {
    // ---- Producer: one thread keeps the rings of K and V full --------------------------------
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) {
      uint32_t items = 0;  // items with keys so far
      uint32_t first = 0;  // ring position of the item's first key tile
      for (int index = blockIdx.x; index < params.num_items; index += gridDim.x) {
        const ForwardItem item = locate_item<Config>(params, index);
        const int count = item.key_tiles.end - item.key_tiles.begin;
        if (count <= 0) continue;
        const int kv_head = item.head / (p.sizes.num_heads / p.sizes.num_kv_heads);

        mbarrier_wait(smem.q_empty, (items & 1) ^ 1);
        load_tile(smem.q, params.q_map, smem.q_full, item.first_query, item.head, item.batch);
        ++items;

        // Last tile first, and K a tile ahead of V: the order in which consumers want them.
        for (int i = 0; i <= count; ++i) {
          if (i < count) {
            const uint32_t position = first + i, stage = position % kStages;
            mbarrier_wait(smem.k_empty[stage], (position / kStages & 1) ^ 1);
            load_tile(smem.k[stage], params.k_map, smem.k_full[stage],
                      (item.key_tiles.end - 1 - i) * Config::kTileK, kv_head, item.batch);
          }
          if (i > 0) {
            const uint32_t position = first + i - 1, stage = position % kStages;
            mbarrier_wait(smem.v_empty[stage], (position / kStages & 1) ^ 1);
            load_values(smem, stage, params.v_map, (item.key_tiles.end - i) * Config::kTileK,
                        kv_head, item.batch);
          }
        }
        first += count;
      }
    }
  } else {
    // ---- Consumers: 64 queries each ----------------------------------------------------------
    setmaxnreg_inc<Config::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % kWarpgroup;
    const int lane = thread % 32, t = lane % 4;
    const int warp = block_warp - 4;  // of all consumers'
    const int row = warp * 16 + lane / 4;

    const SmemDescriptor q_smem = swizzled_descriptor<Config::kRowBytes>(
        smem_address(smem.q[0][consumer * kQueriesPerWarpgroup]), 0);
    const SmemDescriptor k_smem = swizzled_descriptor<Config::kRowBytes>(smem_address(smem.k), 0);
    const SmemDescriptor v_smem =
        swizzled_descriptor<Config::kRowBytes>(smem_address(smem.v), Config::kLeadingBytesV);

    // The first turn belongs to consumer 0; whoever has issued its products passes the turn on.
    constexpr int kTurnThreads = 2 * kWarpgroup;
    if (Config::kTakeTurns && consumer == Config::kConsumers - 1) {
      named_barrier_arrive(kTurn, kTurnThreads);
    }
    const int next_consumer = consumer == Config::kConsumers - 1 ? 0 : consumer + 1;

    uint32_t items = 0;
    uint32_t position = 0;  // in the rings, of the key tile whose weights are at hand
    for (int index = blockIdx.x; index < params.num_items; index += gridDim.x) {
      const ForwardItem item = locate_item<Config>(params, index);
      if (waits_at_once<Config>(p)) let_next_kernel_start();
      const HeadScores scores(p.sizes, p.scores, item.batch, item.head);
      const float scale_log2 = kModified ? 1.f : scores.scale;
      const int query = item.first_query + row;
      const int query_block = item.first_query / 16 + warp;
      [[maybe_unused]] const DropoutLane<false> dropout(
          kDropout ? scores.seed() : 0, scores.batch_head, scores.keep_threshold, lane / 4, t);

      float o[Config::kHeadDim / 2] = {};
      RowState rows;
      [[maybe_unused]] float rounded_sum[2] = {};  // in TF32

      if (item.key_tiles.begin < item.key_tiles.end) {
        float s[Config::kTileK / 2];
        uint32_t weights[Config::kWeightRegisters];
        float correction[2];
        bool must_rescale;
        // Every key of a tile that ends before this is seen by all of the warpgroup's queries.
        const int seen_by_all =
            keys_visible(item.first_query + consumer * kQueriesPerWarpgroup, p.sizes.num_queries,
                         scores.key_count, scores.is_causal);

        // From raw products to weights, except for dividing by their sum.
        const auto weigh = [&](int first_key) {
          if constexpr (kModified) {
#pragma unroll
            for (int i = 0; i < Config::kTileK / 2; ++i) {
              s[i] = scores.score(s[i], query + 8 * (i / 2 % 2),
                                  first_key + 8 * (i / 4) + 2 * t + i % 2);
            }
          } else if (first_key + Config::kTileK > seen_by_all) {
            const int before = first_key + 2 * t;
            const int limit[2] = {
                keys_visible(query, p.sizes.num_queries, scores.key_count, scores.is_causal) -
                    before,
                keys_visible(query + 8, p.sizes.num_queries, scores.key_count, scores.is_causal) -
                    before};
            mask_scores(s, limit);
          }
          must_rescale = online_softmax<Config::kRescaleLazily>(s, scale_log2, rows, correction);
        };
        // Dropout: which weights of a key tile are dropped, and dropping them.
        [[maybe_unused]] DropoutBits<Config::kTileK, Config::kDropoutCalls> dropped;
        const auto draw = [&](int first_key) {
          if constexpr (kDropout) dropped.draw(dropout, query_block, first_key / 16);
        };
        const auto pack = [&] {
          pack_weights<Element>(weights, s);
          if constexpr (kTf32) add_rounded_weights(rounded_sum, weights, correction);
          if constexpr (kDropout) drop_weights<Element>(weights, dropped);
        };
        const auto clear_values = [&](uint32_t at, int first_key) {
          if constexpr (!Config::kValuesTransposed) {
            clear_absent_values<Config, kModified>(smem.v[at % kStages], scores, first_key,
                                                   p.sizes.num_keys, consumer, thread);
          }
        };

        // First scores, from the last key tile: the only one that may be cut.
        int first_key = (item.key_tiles.end - 1) * Config::kTileK;
        mbarrier_wait(smem.q_full, items & 1);
        mbarrier_wait(smem.k_full[position % kStages], position / kStages & 1);
        pin_registers(s);
        wgmma_fence();
        multiply_scores<Config, Element>(s, q_smem,
                                         k_smem + position % kStages * sizeof(smem.k[0]));
        wgmma_commit_group();
        draw(first_key);
        wgmma_wait_group<0>();
        pin_registers(s);
        if (lane == 0) mbarrier_arrive(smem.k_empty[position % kStages]);
        weigh(first_key);
        pack();
        mbarrier_wait(smem.v_full[position % kStages], position / kStages & 1);
        clear_values(position, first_key);

        // Steady state: the next tile's scores and this tile's values are multiplied together;
        // the softmax of the next scores runs as soon as they are there.
        for (int tile = item.key_tiles.end - 2; tile >= item.key_tiles.begin; --tile) {
          const uint32_t next = position + 1;
          mbarrier_wait(smem.k_full[next % kStages], next / kStages & 1);
          if constexpr (Config::kTakeTurns) {
            named_barrier_sync(kTurn + consumer, kTurnThreads);
          }
          pin_registers(s);
          wgmma_fence();
          multiply_scores<Config, Element>(s, q_smem, k_smem + next % kStages * sizeof(smem.k[0]));
          wgmma_commit_group();
          if (Config::kRescaleLazily && must_rescale) rescale_rows(o, correction);
          pin_registers(o);
          pin_registers(weights);
          wgmma_fence();
          multiply_values<Config, Element>(o, weights,
                                           v_smem + position % kStages * sizeof(smem.v[0]));
          wgmma_commit_group();
          if constexpr (Config::kTakeTurns) {
            named_barrier_arrive(kTurn + next_consumer, kTurnThreads);
          }

          first_key = tile * Config::kTileK;
          draw(first_key);
          wgmma_wait_group<1>();
          pin_registers(s);
          if (lane == 0) mbarrier_arrive(smem.k_empty[next % kStages]);
          weigh(first_key);

          // Waiting for the next values here, not where they are used, also puts a branch between
          // the softmax and the wait for this tile's values: ptxas would swap those two.
          mbarrier_wait(smem.v_full[next % kStages], next / kStages & 1);
          wgmma_wait_group<0>();
          pin_registers(o);
          pin_registers(weights);
          if (lane == 0) mbarrier_arrive(smem.v_empty[position % kStages]);
          pack();
          if (!Config::kRescaleLazily && must_rescale) rescale_rows(o, correction);
          position = next;
          if constexpr (kModified) clear_values(position, first_key);
        }

        // The last tile's values; Q is free for the next item.
        if (lane == 0) mbarrier_arrive(smem.q_empty);
        if (Config::kRescaleLazily && must_rescale) rescale_rows(o, correction);
        pin_registers(o);
        pin_registers(weights);
        wgmma_fence();
        multiply_values<Config, Element>(o, weights,
                                         v_smem + position % kStages * sizeof(smem.v[0]));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        pin_registers(o);
        if (lane == 0) mbarrier_arrive(smem.v_empty[position % kStages]);
        ++position;
        ++items;
      }

      // The kernel after this one relies on the one before it as well.
      if constexpr (Config::kValuesTransposed) wait_for_previous_kernel();

      // Divide by the sums of weights and write o and lse; rows without keys give 0 and -inf.
      float factor[2], lse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(rows.sum[r]);
        const float divisor = kTf32 ? quad_sum(rounded_sum[r]) : sum;
        factor[r] = sum == 0 ? 0.f : (kDropout ? scores.keep_scale : 1.f) / divisor;
        lse[r] =
            sum == 0 ? negative_infinity() : fmaf(rows.maximum[r] * scale_log2, kLn2, logf(sum));
      }
      rescale_rows(o, factor);
      int64_t first_row =
          (static_cast<int64_t>(item.batch) * p.sizes.num_heads + item.head) * p.sizes.num_queries;
      float* lse_out = p.lse;
      if (p.num_splits == 1) {
        store_output<Element>(p.o, p.sizes, o, item.batch, item.head, query, t);
        if (p.o_rest.data != nullptr) {
          subtract_rounded<Element>(o);
          store_output<Element>(p.o_rest, p.sizes, o, item.batch, item.head, query, t);
        }
      } else {
        first_row += item.split * p.sizes.batch * p.sizes.num_heads * p.sizes.num_queries;
        store_partial(p, o, first_row, query, t);
        lse_out = p.partial_lse;
      }
      if (t == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (query + 8 * r < p.sizes.num_queries) lse_out[first_row + query + 8 * r] = lse[r];
        }
      }
    }
  }
#else
  __trap();
#endif
}

// ---- launcher ---------------------------------------------------------------------------------

template <class Config, class Element, bool kDropout, bool kModified>
void launch_attention_forward_sm90(const AttentionForwardParams& p, cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  Sm90ForwardParams params;
  params.attention = p;
  params.q_map = make_heads_map(p.q, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                Config::kSlabDims, Config::kTileQ);
  params.k_map = make_heads_map(p.k, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                Config::kSlabDims, Config::kTileK);
  if constexpr (Config::kValuesTransposed) {
    const HeadsView v = transposed_view(p.v_transposed, s.num_keys, s.num_kv_heads, s.head_dim);
    params.v_map = make_heads_map(v, p.dtype, s.batch, s.head_dim, s.num_kv_heads,
                                  static_cast<int>(padded_tokens(s.num_keys)), Config::kSlabDims,
                                  Config::kHeadDim);
  } else {
    params.v_map = make_heads_map(p.v, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                  Config::kSlabDims, Config::kTileK);
  }
  params.num_query_tiles = static_cast<int>(ceil_div(s.num_queries, Config::kTileQ));
  params.num_items =
      static_cast<int>(params.num_query_tiles * s.num_heads * s.batch * p.num_splits);

  // Equal items: as many blocks as run at once, whose producers load across item borders. Unequal
  // ones: a block each, so that the hardware balances them.
  const bool is_uneven = p.scores.is_causal || p.scores.kv_lengths != nullptr;
  int device = 0, num_sms = 0;
  check_cuda(cudaGetDevice(&device), "attention_forward_sm90");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "attention_forward_sm90");
  const int blocks =
      is_uneven ? params.num_items : std::min(params.num_items, num_sms * Config::kBlocksPerSm);
  const auto kernel = attention_forward_sm90_kernel<Config, Element, kDropout, kModified>;
  constexpr size_t kSmemBytes = sizeof(ForwardStorage<Config>);
  static_assert(kSmemBytes <= 227 * 1024);
  launch_chained(kernel, "attention_forward_sm90", blocks, Config::kThreads, kSmemBytes, stream,
                 params);
}

// The tiles of one padded head dim: where scores are only scaled; for at most 64 queries of that
// kind; with dropout; and where a bias or masks need registers.
template <class Plain_, class Short_, class Dropout_, class Modified_>
struct Sm90ForwardConfigs {
  using Plain = Plain_;
  using Short = Short_;
  using Dropout = Dropout_;
  using Modified = Modified_;
};

template <class Configs, class Element>
void dispatch_attention_forward_sm90(const AttentionForwardParams& p, cudaStream_t stream) {
  const ScoreModifiers& m = p.scores;
  const bool modified = is_modified(m) || !(m.scale > 0);
  const bool has_dropout = m.seed != nullptr;
  if (modified && has_dropout) {
    launch_attention_forward_sm90<typename Configs::Modified, Element, true, true>(p, stream);
  } else if (modified) {
    launch_attention_forward_sm90<typename Configs::Modified, Element, false, true>(p, stream);
  } else if (has_dropout) {
    launch_attention_forward_sm90<typename Configs::Dropout, Element, true, false>(p, stream);
  } else if (p.sizes.num_queries <= Configs::Short::kTileQ) {
    launch_attention_forward_sm90<typename Configs::Short, Element, false, false>(p, stream);
  } else {
    launch_attention_forward_sm90<typename Configs::Plain, Element, false, false>(p, stream);
  }
}

template <int kHeadDim, class Configs>
void dispatch_attention_forward_sm90(const AttentionForwardParams& p, cudaStream_t stream) {
  constexpr bool kTf32 = Configs::Plain::kValuesTransposed;
  constexpr DType kDType = kTf32 ? DType::kTF32 : DType::kBFloat16;
  constexpr Sm90ForwardTile kPlain = sm90_forward_tile(kDType, kHeadDim, 1 << 20);
  constexpr Sm90ForwardTile kShort = sm90_forward_tile(kDType, kHeadDim, 1);
  static_assert(Configs::Plain::kTileQ == kPlain.queries && Configs::Plain::kTileK == kPlain.keys);
  static_assert(Configs::Short::kTileQ == kShort.queries && Configs::Short::kTileK == kShort.keys);
  if constexpr (kTf32) {
    dispatch_attention_forward_sm90<Configs, Tf32>(p, stream);
  } else if (p.dtype == DType::kBFloat16) {
    dispatch_attention_forward_sm90<Configs, __nv_bfloat16>(p, stream);
  } else {
    dispatch_attention_forward_sm90<Configs, __half>(p, stream);
  }
}

}  // namespace frx
