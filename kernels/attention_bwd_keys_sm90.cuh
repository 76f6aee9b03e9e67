// dk and dv on Hopper. A block keeps 128 keys and values of one (batch, key head) and walks over
// the query tiles of every query head that shares them. Warpgroup 0 drives the copy engine (rings
// of Q and dO tiles) and brings lse and delta; two hold 64 keys each, and with at most 64 dims a
// third one makes dq of their tiles. Scores are computed transposed, so that weights and their
// gradients go from accumulators straight into the products that make dv and dk.
// docs/design/hopper.md has the shared-memory map and the barrier table.
#pragma once

#include <cstdint>

#include "attention_bwd_keys_sm90_items.cuh"
#include "chained_launch.cuh"
#include "tensor_map.h"

namespace frx {

// s [64 keys, kTileQ queries] of the warpgroup: products become weights, before dropout. (key,
// query) is the thread's first element; lse_log2 belongs to that query on.
template <bool kModified, int kCount>
__device__ __forceinline__ void weigh_keys(float (&s)[kCount], const HeadScores& scores,
                                           const float* lse_log2, int key, int query,
                                           bool seen_by_all) {
  if constexpr (kModified) {
    asm volatile("" : "+r"(key));  // addresses made of it would be kept in registers, and spilled
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = 8 * (i / 4) + i % 2;
      s[i] =
          exp2_approx(scores.score(s[i], query + column, key + 8 * (i / 2 % 2)) - lse_log2[column]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[4 * n + i] = exp2_approx(fmaf(s[4 * n + i], scores.scale, i % 2 == 0 ? -lse.x : -lse.y));
      }
    }
    if (!seen_by_all) {
      int unseeing[2];  // of the queries from `query` on
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unseeing[r] = first_query_seeing(key + 8 * r, scores.num_queries, scores.key_count,
                                         scores.is_causal) -
                      query;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (8 * (i / 4) + i % 2 < unseeing[i / 2 % 2]) s[i] = 0;
      }
    }
  }
}

// ---- dq ---------------------------------------------------------------------------------------

// Score gradients [64 keys, kTileQ queries] of a consumer, packed in pairs of queries, into shared
// memory as [query][key].
template <int kTileQ>
__device__ __forceinline__ void write_gradients(SlabRow (&ds)[kTileQ],
                                                const uint32_t (&gradients)[kTileQ / 4],
                                                int thread) {
  // Matrices of a store, by l / 8: keys 0-7 and 8-15 of the warp, of queries 0-7, then of 8-15.
  const int warp = thread / 32, lane = thread % 32;
  const int query = lane % 8 + lane / 16 * 8, key_chunk = 2 * warp + lane / 8 % 2;
  const uint32_t address = smem_address(ds[query]) + ((key_chunk ^ lane % 8) * 16);
#pragma unroll
  for (int n = 0; n < kTileQ / 16; ++n) {
    const uint32_t matrices[4] = {gradients[4 * n], gradients[4 * n + 1], gradients[4 * n + 2],
                                  gradients[4 * n + 3]};
    stmatrix_x4_transposed(address + n * 16 * kRowBytes, matrices);
  }
  fence_proxy_async();
}

// The same, so that whoever makes dq of the tile at that position may read them.
template <class Config>
__device__ __forceinline__ void hand_over_gradients(KeySideStorage<Config>& smem,
                                                    const uint32_t (&gradients)[Config::kTileQ / 4],
                                                    uint32_t position, int consumer, int thread) {
  const uint32_t parity = position % 2, other = 1 - consumer;
  SlabRow(&ds)[Config::kTileQ] = smem.ds[parity][consumer];
  if constexpr (Config::kHasDqWarpgroup) {
    mbarrier_wait(smem.ds_empty[parity], (position / 2 & 1) ^ 1);
    write_gradients(ds, gradients, thread);
    __syncwarp();  // every lane's gradients are written
    if (thread % 32 == 0) mbarrier_arrive(smem.ds_full[parity]);
  } else if (parity == other) {
    // The other's dq of two tiles ago is made; one's own is, in program order.
    if (position >= 2) named_barrier_sync(kGradientsEmpty + other, 2 * kWarpgroup);
    write_gradients(ds, gradients, thread);
    named_barrier_arrive(kGradientsFull + other, 2 * kWarpgroup);
  } else {
    write_gradients(ds, gradients, thread);
  }
}

// dq [64 queries, D] = ds k of the tile at that position.
template <class Config, class Element>
__device__ __forceinline__ void multiply_keys(float (&dq)[Config::kHeadDim / 2],
                                              KeySideStorage<Config>& smem, uint32_t position) {
  const SmemDescriptor ds = swizzled_descriptor<kRowBytes>(smem_address(smem.ds[position % 2]), 0);
  const SmemDescriptor k = swizzled_descriptor<kHeadRowBytes<Config::kHeadDim>>(
      smem_address(smem.kv[0]), Config::kSlabBytesKeys);
  pin_registers(dq);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    const uint32_t slab = step / 4 * sizeof(smem.ds[0][0]);
    Wgmma<Element, Config::kHeadDim>::template ss<true>(
        dq, ds + (slab + step % 4 * 32), k + step * 16 * kHeadRowBytes<Config::kHeadDim>, step > 0);
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
  pin_registers(dq);
}

// Adds a warp's 16 queries to dq_parts, by the copy engine: whoever multiplies need not wait for as
// many additions as there are scores. `room` is the warp's own.
template <class Config>
__device__ __forceinline__ void add_dq(const AttentionBackwardParams& p,
                                       float4 (&room)[Config::kHeadDim / 8][32],
                                       const float (&dq)[Config::kHeadDim / 2], int64_t batch_head,
                                       int query, int lane) {
  if (query >= p.sizes.num_queries) return;
  if (lane == 0) cp_async_bulk_wait_read();  // the last tile's
  __syncwarp();
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n) {
    room[n][lane] = make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    cp_reduce_async_bulk_add(dq_fragments<Config::kHeadDim>(p, 0, batch_head, query, 0), room,
                             sizeof(room));
    cp_async_bulk_commit_group();
  }
}

// A warpgroup of its own: dq of every tile, as soon as both consumers have written its gradients.
template <class Config, class Element>
__device__ __forceinline__ void make_dq(KeySideStorage<Config>& smem,
                                        const AttentionBackwardParams& p, const KeyItem& item,
                                        int thread) {
  const int warp = thread / 32, lane = thread % 32;
  uint32_t position = 0;
  if (item.query_tiles.begin < item.query_tiles.end) mbarrier_wait(smem.kv_full, 0);
  for (int head = item.first_head; head < item.end_head; ++head) {
    const int64_t batch_head = item.batch * p.sizes.num_heads + head;
    for (int tile = item.query_tiles.begin; tile < item.query_tiles.end; ++tile, ++position) {
      float dq[Config::kHeadDim / 2];
      mbarrier_wait(smem.ds_full[position % 2], position / 2 & 1);
      multiply_keys<Config, Element>(dq, smem, position);
      if (lane == 0) mbarrier_arrive(smem.ds_empty[position % 2]);
      add_dq<Config>(p, smem.dq[warp], dq, batch_head, tile * Config::kTileQ + warp * 16, lane);
    }
  }
  if (lane == 0) cp_async_bulk_wait_read();
  if (p.k_rotation.rotary_dim > 0 && item.part < 0) {
    named_barrier_arrive(kProductsDone, Config::kThreads - kWarpgroup);
  }
}

// ---- score gradients that are kept ------------------------------------------------------------

// A consumer warp's [16 keys, 64 queries], packed in pairs of queries: a register is a core matrix.
__device__ __forceinline__ void keep_gradients(GradientTile& tile,
                                               const uint32_t (&gradients)[kGradientQueries / 4],
                                               int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kGradientQueries / 4; ++i) {
    CoreMatrix& matrix = tile[2 * warp + i % 2][i / 2];
    reinterpret_cast<uint32_t*>(&matrix)[lane] = gradients[i];
  }
}

// ---- parts of dk and dv -----------------------------------------------------------------------

// A warp's 16 keys in the order of dkv_parts.
template <int kCount>
__device__ __forceinline__ void store_part(float* fragments, const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    *reinterpret_cast<float4*>(fragments + i / 4 * kFragment) =
        make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

// ---- the kernel -------------------------------------------------------------------------------

// kModified: a bias, a mask over scores or removed keys.
template <class Config, class Element, bool kDropout, bool kModified>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_keys_sm90_kernel(const __grid_constant__ KeySideParams<Config> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTileQ = Config::kTileQ, kHeadDim = Config::kHeadDim;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<KeySideStorage<Config>*>(smem_bytes);
  const AttentionBackwardParams& p = params.attention;
  const int block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = block_warp / 4;

  if (threadIdx.x == 0) {
    init_barriers(smem);
    prefetch_tensormap(params.q_map);
    prefetch_tensormap(params.k_map);
    prefetch_tensormap(params.v_map);
    prefetch_tensormap(params.dout_map);
  }
  __syncthreads();

  const KeyItem item = locate_keys<Config>(params);
  // The producer waits later: it first brings what was there before delta.
  if (warpgroup > 0) {
    if (params.follows_delta) wait_for_previous_kernel();
    let_next_kernel_start();
  }
  if (warpgroup == 0) {
    // ---- Producer: one warp keeps the rings of Q and dO full ---------------------------------
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32 && item.query_tiles.begin < item.query_tiles.end) {
      produce_queries(smem, params, item, threadIdx.x);
    }
  } else if (Config::kHasDqWarpgroup && warpgroup == 1 + kConsumers) {
    if constexpr (Config::kHasDqWarpgroup) {
      setmaxnreg_dec<Config::kDqRegisters>();
      make_dq<Config, Element>(smem, p, item, threadIdx.x % kWarpgroup);
    }
  } else {
    // ---- Consumers: 64 keys each -------------------------------------------------------------
    setmaxnreg_inc<Config::kMultiplierRegisters>();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % kWarpgroup;
    const int lane = thread % 32, t = lane % 4;
    const int warp = block_warp - 4;  // of all consumers'
    const int first_row = consumer * kRowsPerConsumer, row = warp * 16 + lane / 4;
    const int key_block = item.first_key / 16 + warp;

    const SmemDescriptor k_smem =
        swizzled_descriptor<kHeadRowBytes<kHeadDim>>(smem_address(smem.kv[0][0][first_row]), 0);
    const SmemDescriptor v_smem = k_smem + sizeof(smem.kv[0]);
    const SmemDescriptor tiles_smem = swizzled_descriptor<kHeadRowBytes<kHeadDim>>(
        smem_address(smem.tiles), Config::kSlabBytesQueries);

    float dk[kHeadDim / 2] = {}, dv[kHeadDim / 2] = {};
    uint32_t position = 0;  // in the rings
    for (int head = item.first_head; head < item.end_head; ++head) {
      const HeadScores scores(p.sizes, p.scores, item.batch, head);
      [[maybe_unused]] const DropoutLane<true> dropout(
          kDropout ? scores.seed() : 0, scores.batch_head, scores.keep_threshold, lane / 4, t);
      if (position == 0 && item.query_tiles.begin < item.query_tiles.end) {
        mbarrier_wait(smem.kv_full, 0);
        // NaN in a key that does not exist must not spread.
        const int first_key = item.first_key;
        if ((scores.key_count < p.sizes.num_keys && first_key + kTileRows > scores.key_count) ||
            (kModified && scores.key_keep != nullptr)) {
          const auto exists = [&](int i) { return scores.key_exists(first_key + i); };
#pragma unroll
          for (auto& tile : smem.kv) {
            clear_absent_rows(tile, first_row, first_row + kRowsPerConsumer, thread, exists);
          }
          fence_proxy_async();
          named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
        }
      }
      for (int tile = item.query_tiles.begin; tile < item.query_tiles.end; ++tile, ++position) {
        const int first_query = tile * kTileQ;
        const auto q_stage = Config::q_stage(position), dout_stage = Config::dout_stage(position);
        const uint32_t statistics = position % Config::kStagesStatistics;
        const SmemDescriptor q_tile = tiles_smem + q_stage.index * sizeof(smem.tiles[0]);
        const SmemDescriptor dout_tile = tiles_smem + dout_stage.index * sizeof(smem.tiles[0]);
        float s[kTileQ / 2], ds[kTileQ / 2];
        uint32_t weights[kTileQ / 4], gradients[kTileQ / 4];

        // s = k q^T and dp = v dout^T
        mbarrier_wait(smem.full[q_stage.index], q_stage.parity);
        pin_registers(s);
        wgmma_fence();
        multiply_dims<Element, kTileQ, kHeadDim>(s, k_smem, Config::kSlabBytesKeys, q_tile,
                                                 Config::kSlabBytesQueries);
        wgmma_commit_group();
        mbarrier_wait(smem.full[dout_stage.index], dout_stage.parity);
        if constexpr (Config::kDs) {
          pin_registers(ds);
          wgmma_fence();
          multiply_dims<Element, kTileQ, kHeadDim>(ds, v_smem, Config::kSlabBytesKeys, dout_tile,
                                                   Config::kSlabBytesQueries);
          wgmma_commit_group();
        }

        // Weights, while dp is multiplied
        [[maybe_unused]] DropoutBits<kTileQ> dropped;
        if constexpr (kDropout) dropped.draw(dropout, key_block, first_query / 16);
        wgmma_wait_group<Config::kDs ? 1 : 0>();
        pin_registers(s);
        if (Config::kAlternates && lane == 0) mbarrier_arrive(smem.empty[q_stage.index]);
        const bool seen_by_all =
            item.first_key + first_row + kRowsPerConsumer <=
            keys_visible(first_query, p.sizes.num_queries, scores.key_count, scores.is_causal);
        weigh_keys<kModified>(s, scores, &smem.lse_log2[statistics][2 * t], item.first_key + row,
                              first_query + 2 * t, seen_by_all);

        // dv += p^T dout
        if constexpr (Config::kDv) {
          pack_weights<Element>(weights, s);
          if constexpr (kDropout) drop_weights<Element>(weights, dropped);
          pin_registers(dv);
          pin_registers(weights);
          wgmma_fence();
          multiply_rows<Element, kHeadDim, kTileQ>(dv, weights, dout_tile);
          wgmma_commit_group();
        }

        // ds, while dv is multiplied
        if constexpr (Config::kDs) {
          wgmma_wait_group<Config::kDv ? 1 : 0>();
          pin_registers(ds);
          if (!Config::kDv && lane == 0) mbarrier_arrive(smem.empty[dout_stage.index]);
#pragma unroll
          for (int n = 0; n < kTileQ / 8; ++n) {
            const float2 delta =
                *reinterpret_cast<const float2*>(&smem.delta[statistics][8 * n + 2 * t]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int at = 4 * n + i;
              ds[at] = score_gradient<kDropout>(s[at], ds[at], i % 2 == 0 ? delta.x : delta.y,
                                                kDropout && dropped.is_dropped(at / 2, i % 2),
                                                scores.keep_scale);
            }
          }
          pack_weights<Element>(gradients, ds);
        }
        if constexpr (Config::kDq) {
          hand_over_gradients<Config>(smem, gradients, position, consumer, thread);
        }
        if constexpr (Config::kKeepsDs) {
          keep_gradients(gradient_tile(p, item.block - params.window.first_block,
                                       head - item.first_head, first_query),
                         gradients, warp, lane);
        }

        // dk += ds^T q
        if constexpr (Config::kDk) {
          pin_registers(dk);
          pin_registers(gradients);
          wgmma_fence();
          multiply_rows<Element, kHeadDim, kTileQ>(dk, gradients, q_tile);
          wgmma_commit_group();
        }

        // The tiles are free again
        if constexpr (Config::kDv) {
          wgmma_wait_group<Config::kDk ? 1 : 0>();
          pin_registers(dv);
          pin_registers(weights);
          if (lane == 0) mbarrier_arrive(smem.empty[dout_stage.index]);
        }
        if constexpr (Config::kDk) {
          wgmma_wait_group<0>();
          pin_registers(dk);
          pin_registers(gradients);
        }
        if (!Config::kAlternates && lane == 0) mbarrier_arrive(smem.empty[q_stage.index]);
        if constexpr (Config::kDq && !Config::kHasDqWarpgroup) {
          if (position % 2 == consumer) {
            float dq[kHeadDim / 2];
            named_barrier_sync(kGradientsFull + consumer, 2 * kWarpgroup);
            multiply_keys<Config, Element>(dq, smem, position);
            named_barrier_arrive(kGradientsEmpty + consumer, 2 * kWarpgroup);
            add_dq<Config>(p, smem.dq[warp], dq, scores.batch_head, first_query + warp % 4 * 16,
                           lane);
          }
        }
      }
    }

    // The kernel after this one relies on those before it as well.
    wait_for_previous_kernel();
    if (Config::kDq && !Config::kHasDqWarpgroup && lane == 0) cp_async_bulk_wait_read();
    if (item.part >= 0) {  // whoever sums the parts scales, turns and rounds
      if constexpr (Config::kDk) {
        store_part(dkv_fragments<kHeadDim>(p, item.part, kKeyGradientDk, warp, lane), dk);
      }
      if constexpr (Config::kDv) {
        store_part(dkv_fragments<kHeadDim>(p, item.part, kKeyGradientDv, warp, lane), dv);
      }
      return;
    }
    if constexpr (Config::kDv) {
      store_heads<Element>(p.dv, dv, kDropout ? p.scores.keep_scale : 1.f, item.batch, item.kv_head,
                           item.first_key + row, p.sizes.num_keys, p.sizes.head_dim, t);
    }
    if constexpr (Config::kDk) {
      if (p.k_rotation.rotary_dim == 0) {
        store_heads<Element>(p.dk, dk, p.scores.scale, item.batch, item.kv_head,
                             item.first_key + row, p.sizes.num_keys, p.sizes.head_dim, t);
      } else {
        named_barrier_sync(kProductsDone, Config::kThreads - kWarpgroup);
        using Rows = TurningRows<kHeadDim>;
        static_assert(kConsumerWarps * sizeof(Rows) <= sizeof(smem.kv) + sizeof(smem.tiles));
        store_turned_back<Element>(p.dk, dk, p.scores.scale, p.k_rotation, params.turns,
                                   reinterpret_cast<Rows*>(smem_bytes)[warp], item.batch,
                                   item.kv_head, item.first_key + warp * kWarpRows,
                                   p.sizes.num_keys, p.sizes.head_dim, lane);
      }
    }
  }
#else
  __trap();
#endif
}

// What is left to fill in of `params`, and so many blocks or pieces.
template <class Config, class Element, bool kDropout, bool kModified>
void launch_backward_keys(const AttentionBackwardParams& p, KeySideParams<Config> params,
                          int64_t blocks, cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  params.attention = p;
  params.turns = plan_turns(p.k_rotation);
  params.q_map = make_heads_map(p.q, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, Config::kTileQ);
  params.dout_map = make_heads_map(p.dout, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                   kSlabDims<Config::kHeadDim>, Config::kTileQ);
  params.k_map = make_heads_map(p.k, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, kTileRows);
  params.v_map = make_heads_map(p.v, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims<Config::kHeadDim>, kTileRows);
  static_assert(sizeof(KeySideStorage<Config>) <= kMaxSmemBytes);
  launch_chained(attention_backward_keys_sm90_kernel<Config, Element, kDropout, kModified>,
                 "attention_backward_keys_sm90", blocks, Config::kThreads,
                 sizeof(KeySideStorage<Config>), stream, params);
}

template <class Config>
void run_backward_keys(const AttentionBackwardParams& p, bool follows_delta, cudaStream_t stream) {
  Sm90BackwardParams params = {};
  params.follows_delta = follows_delta;
  choose_backward_variant(p, [&](auto element, auto dropout, auto modified) {
    launch_backward_keys<Config, decltype(element), decltype(dropout)::value,
                         decltype(modified)::value>(p, params, key_blocks(p.sizes, p.key_cut),
                                                    stream);
  });
}

// dv of a window's keys, and the score gradients that dk and dq are made of.
template <class Config>
void run_backward_window(const AttentionBackwardParams& p, const KeyWindow& window,
                         const WindowCut& cut, cudaStream_t stream) {
  Sm90WindowParams params = {};
  params.follows_delta = true;
  params.window = window;
  params.cut = cut;
  params.order = order_pieces(cut.shares, window.end_block - window.first_block - cut.whole_blocks);
  choose_plain_variant(p, [&](auto element, auto dropout) {
    launch_backward_keys<Config, decltype(element), decltype(dropout)::value, false>(
        p, params, cut.whole_blocks + params.order.count, stream);
  });
}

}  // namespace frx
