// dk and dv on Hopper. A block keeps 128 keys and values of one (batch, key head) and walks over
// the query tiles of every query head that shares them. Warpgroup 0 drives the copy engine (rings
// of Q and dO tiles) and brings lse and delta; the other two hold 64 keys each. Scores are computed
// transposed, so that weights and their gradients go from accumulators straight into the products
// that make dv and dk. docs/design/hopper.md has the shared-memory map and the barrier table.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_bwd_turn_sm90.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace frx {

// kDk, kDv: which of the two this kernel makes. With 256 dims a thread's registers hold one only.
// kDq: it also adds dq up, 64 queries a consumer, with the score gradients of both: half of every
// tile each, or the consumers in turns a whole one.
template <int kHeadDim_, int kTileQ_, int kStagesQ_, int kStagesDout_, bool kDk_, bool kDv_,
          bool kDq_>
struct KeySideConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSlabs = kHeadDim / kSlabDims;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kStagesQ = kStagesQ_;
  static constexpr int kStagesDout = kStagesDout_;
  static constexpr bool kDk = kDk_;
  static constexpr bool kDv = kDv_;
  static constexpr bool kDq = kDq_;
  static constexpr uint32_t kSlabBytesKeys = kTileRows * kRowBytes;
  static constexpr uint32_t kSlabBytesQueries = kTileQ * kRowBytes;
  // Dropout serves 16 x 16 corners of the score matrix.
  static_assert(kTileQ % 16 == 0 && kTileQ <= 256);
  static_assert(!kDq || (kDk && kDv && (kTileQ == 64 || kTileQ == 128)));
  // Queries whose weights become operands at a time: with all of a large tile's in registers, none
  // are left.
  static constexpr int kPart = kTileQ == 128 ? 64 : kTileQ;
  static constexpr int kParts = kTileQ / kPart;

  // Whether a consumer makes dq of (a half of) the score gradients in that buffer.
  static __device__ __forceinline__ bool makes_dq(int buffer, int consumer) {
    return kTileQ == 128 || buffer == consumer;
  }
};

// Score gradients on their way to dq: [buffer: tile's parity][consumer's keys][query][key].
template <int kTileQ, bool kDq>
struct GradientStorage {
  alignas(1024) SlabRow ds[2][kConsumers][kTileQ];
};

template <int kTileQ>
struct GradientStorage<kTileQ, false> {};

template <class Config>
struct KeySideStorage : GradientStorage<Config::kTileQ, Config::kDq> {
  // Weights need k alone; their gradients need v too.
  alignas(1024) SlabRow kv[Config::kDk ? 2 : 1][Config::kSlabs][kTileRows];
  alignas(1024) SlabRow q[Config::kStagesQ][Config::kSlabs][Config::kTileQ];
  alignas(1024) SlabRow dout[Config::kStagesDout][Config::kSlabs][Config::kTileQ];
  alignas(16) float lse_log2[Config::kStagesQ][Config::kTileQ];
  alignas(16) float delta[Config::kStagesQ][Config::kTileQ];
  uint64_t kv_full;
  uint64_t q_full[Config::kStagesQ], q_empty[Config::kStagesQ];  // with lse and delta
  uint64_t dout_full[Config::kStagesDout], dout_empty[Config::kStagesDout];
};

struct KeyItem {
  int64_t batch;
  int kv_head;
  int first_head, end_head;  // the query heads that share the keys
  int first_key;
  IndexRange query_tiles;
};

// Key tiles vary fastest: blocks that run side by side then share Q and dO in L2. Causal: the first
// keys are seen by most queries, so the longest blocks start first.
template <class Config>
__device__ __forceinline__ KeyItem locate_keys(const AttentionBackwardParams& p) {
  const int num_key_tiles = ceil_div(p.sizes.num_keys, kTileRows);
  const int group = p.sizes.num_heads / p.sizes.num_kv_heads;
  KeyItem item;
  const int rest = blockIdx.x / num_key_tiles;
  item.first_key = (blockIdx.x - rest * num_key_tiles) * kTileRows;
  item.batch = rest / p.sizes.num_kv_heads;
  item.kv_head = rest % p.sizes.num_kv_heads;
  item.first_head = item.kv_head * group;
  item.end_head = item.first_head + group;
  const int keys = key_count(p.scores.kv_lengths, item.batch, p.sizes.num_keys);
  item.query_tiles = query_tiles_of_keys(item.first_key, Config::kTileQ, p.sizes.num_queries, keys,
                                         p.scores.is_causal);
  return item;
}

// One warp: K and V once, then Q, dO and the row statistics tile by tile.
template <class Config>
__device__ __forceinline__ void produce_queries(KeySideStorage<Config>& smem,
                                                const Sm90BackwardParams& params,
                                                const KeyItem& item, int lane) {
  const AttentionBackwardParams& p = params.attention;
  if (lane == 0) {
    load_tile(smem.kv[0], params.k_map, smem.kv_full, item.first_key, item.kv_head, item.batch);
    if constexpr (Config::kDk) {
      load_tile(smem.kv[1], params.v_map, smem.kv_full, item.first_key, item.kv_head, item.batch);
    }
  }
  uint32_t position = 0;
  for (int head = item.first_head; head < item.end_head; ++head) {
    const int64_t batch_head = item.batch * p.sizes.num_heads + head;
    for (int tile = item.query_tiles.begin; tile < item.query_tiles.end; ++tile, ++position) {
      const int first_query = tile * Config::kTileQ;
      const uint32_t q_stage = position % Config::kStagesQ;
      const uint32_t dout_stage = position % Config::kStagesDout;
      mbarrier_wait(smem.q_empty[q_stage], (position / Config::kStagesQ & 1) ^ 1);
      if (lane == 0) {
        load_tile(smem.q[q_stage], params.q_map, smem.q_full[q_stage], first_query, head,
                  item.batch);
      }
      for (int i = lane; i < Config::kTileQ; i += 32) {
        smem.lse_log2[q_stage][i] = row_lse_log2(p, batch_head, first_query + i);
        if constexpr (Config::kDk) {
          smem.delta[q_stage][i] = row_delta(p, batch_head, first_query + i);
        }
      }
      __syncwarp();  // every lane's statistics are written
      if (lane == 0) mbarrier_arrive(smem.q_full[q_stage]);

      mbarrier_wait(smem.dout_empty[dout_stage], (position / Config::kStagesDout & 1) ^ 1);
      if (lane == 0) {
        load_tile(smem.dout[dout_stage], params.dout_map, smem.dout_full[dout_stage], first_query,
                  head, item.batch);
      }
    }
  }
}

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

// The accumulators of one part of a tile's queries, as operands.
template <class Element, int kOperands, int kCount>
__device__ __forceinline__ void pack_part(uint32_t (&operands)[kOperands], const float (&x)[kCount],
                                          int part) {
  float values[2 * kOperands];
#pragma unroll
  for (int i = 0; i < 2 * kOperands; ++i) values[i] = x[part * 2 * kOperands + i];
  pack_weights<Element>(operands, values);
}

template <int kParts, int kCount>
__device__ __forceinline__ void pin_parts(uint32_t (&x)[kParts][kCount]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) pin_registers(x[part]);
}

// Score gradients [64 keys, kPart queries] of a part of the tile, packed in pairs of queries, into
// shared memory as [query][key].
template <class Config>
__device__ __forceinline__ void hand_over_gradients(SlabRow (&ds)[Config::kTileQ],
                                                    const uint32_t (&gradients)[Config::kPart / 4],
                                                    int part, uint32_t position, int consumer,
                                                    int thread) {
  const int buffer = position % 2, other = 1 - consumer;
  const bool is_for_other = Config::makes_dq(buffer, other);
  // The other's dq of two tiles ago is made; one's own is, in program order.
  if (is_for_other && part == 0 && position >= 2) {
    named_barrier_sync(kGradientsEmpty + 2 * buffer + other, 2 * kWarpgroup);
  }

  // Matrices of a store, by l / 8: keys 0-7 and 8-15 of the warp, of queries 0-7, then of 8-15.
  const int warp = thread / 32, lane = thread % 32;
  const int query = lane % 8 + lane / 16 * 8, key_chunk = 2 * warp + lane / 8 % 2;
  const uint32_t address =
      smem_address(ds[part * Config::kPart + query]) + ((key_chunk ^ lane % 8) * 16);
#pragma unroll
  for (int n = 0; n < Config::kPart / 16; ++n) {
    const uint32_t matrices[4] = {gradients[4 * n], gradients[4 * n + 1], gradients[4 * n + 2],
                                  gradients[4 * n + 3]};
    stmatrix_x4_transposed(address + n * 16 * kRowBytes, matrices);
  }
  fence_proxy_async();
  if (is_for_other && part == Config::kParts - 1) {
    named_barrier_arrive(kGradientsFull + 2 * buffer + other, 2 * kWarpgroup);
  }
}

// dq of 64 queries = ds k, added to dq_parts.
template <class Config, class Element>
__device__ __forceinline__ void add_dq(const AttentionBackwardParams& p,
                                       KeySideStorage<Config>& smem, int64_t batch_head,
                                       int first_query, int buffer, int consumer, int thread) {
  const int first_row_of_tile = Config::kTileQ == 128 ? consumer * 64 : 0;
  const SmemDescriptor ds_smem =
      swizzled_descriptor<kRowBytes>(smem_address(smem.ds[buffer][0][first_row_of_tile]), 0);
  const SmemDescriptor k_smem =
      swizzled_descriptor<kRowBytes>(smem_address(smem.kv[0]), Config::kSlabBytesKeys);
  float dq[Config::kHeadDim / 2];
  named_barrier_sync(kGradientsFull + 2 * buffer + consumer, 2 * kWarpgroup);
  pin_registers(dq);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    const uint32_t slab = step / 4 * sizeof(smem.ds[0][0]);
    Wgmma<Element, Config::kHeadDim>::template ss<true>(dq, ds_smem + (slab + step % 4 * 32),
                                                        k_smem + step * 16 * kRowBytes, step > 0);
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
  pin_registers(dq);
  named_barrier_arrive(kGradientsEmpty + 2 * buffer + consumer, 2 * kWarpgroup);

  const int first_row = first_query + first_row_of_tile + thread / 32 * 16;
  if (first_row >= p.sizes.num_queries) return;
  float* out = dq_fragments<Config::kHeadDim>(p, 0, batch_head, first_row, thread % 32);
#pragma unroll
  for (int n = 0; n < Config::kHeadDim / 8; ++n) {
    red_add_float4(out + n * kFragment,
                   make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]));
  }
}

// kModified: a bias, a mask over scores or removed keys.
template <class Config, class Element, bool kDropout, bool kModified>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    attention_backward_keys_sm90_kernel(const __grid_constant__ Sm90BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTileQ = Config::kTileQ, kPart = Config::kPart, kSlabs = Config::kSlabs;
  constexpr int kStagesQ = Config::kStagesQ, kStagesDout = Config::kStagesDout;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<KeySideStorage<Config>*>(smem_bytes);
  const AttentionBackwardParams& p = params.attention;
  const int block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = block_warp / 4;

  // Barriers: a full one completes by the copy's bytes, an empty one by every consumer warp.
  if (threadIdx.x == 0) {
    mbarrier_init(smem.kv_full, Config::kDk ? 2 : 1);
    for (int stage = 0; stage < kStagesQ; ++stage) {
      mbarrier_init(smem.q_full[stage], 2);  // the copy and the statistics
      mbarrier_init(smem.q_empty[stage], kConsumerWarps);
    }
    for (int stage = 0; stage < kStagesDout; ++stage) {
      mbarrier_init(smem.dout_full[stage], 1);
      mbarrier_init(smem.dout_empty[stage], kConsumerWarps);
    }
    fence_mbarrier_init();
    prefetch_tensormap(params.q_map);
    prefetch_tensormap(params.k_map);
    prefetch_tensormap(params.v_map);
    prefetch_tensormap(params.dout_map);
  }
  __syncthreads();

  const KeyItem item = locate_keys<Config>(p);
  if (warpgroup == 0) {
    // ---- Producer: one warp keeps the rings of Q and dO full ---------------------------------
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32 && item.query_tiles.begin < item.query_tiles.end) {
      produce_queries(smem, params, item, threadIdx.x);
    }
  } else {
    // ---- Consumers: 64 keys each -------------------------------------------------------------
    setmaxnreg_inc<kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % kWarpgroup;
    const int lane = thread % 32, t = lane % 4;
    const int warp = block_warp - 4;  // of all consumers'
    const int first_row = consumer * kRowsPerConsumer, row = warp * 16 + lane / 4;
    const int key_block = item.first_key / 16 + warp;

    const SmemDescriptor k_smem =
        swizzled_descriptor<kRowBytes>(smem_address(smem.kv[0][0][first_row]), 0);
    const SmemDescriptor v_smem = k_smem + sizeof(smem.kv[0]);
    const SmemDescriptor q_smem =
        swizzled_descriptor<kRowBytes>(smem_address(smem.q), Config::kSlabBytesQueries);
    const SmemDescriptor dout_smem =
        swizzled_descriptor<kRowBytes>(smem_address(smem.dout), Config::kSlabBytesQueries);

    float dk[Config::kHeadDim / 2] = {}, dv[Config::kHeadDim / 2] = {};
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
        const uint32_t q_stage = position % kStagesQ, dout_stage = position % kStagesDout;
        const SmemDescriptor q_tile = q_smem + q_stage * sizeof(smem.q[0]);
        const SmemDescriptor dout_tile = dout_smem + dout_stage * sizeof(smem.dout[0]);
        float s[kTileQ / 2], ds[kTileQ / 2];
        uint32_t weights[Config::kParts][kPart / 4], gradients[Config::kParts][kPart / 4];

        // s = k q^T and dp = v dout^T
        mbarrier_wait(smem.q_full[q_stage], position / kStagesQ & 1);
        pin_registers(s);
        wgmma_fence();
        multiply_dims<Element, kTileQ, kSlabs>(s, k_smem, Config::kSlabBytesKeys, q_tile,
                                               Config::kSlabBytesQueries);
        wgmma_commit_group();
        mbarrier_wait(smem.dout_full[dout_stage], position / kStagesDout & 1);
        if constexpr (Config::kDk) {
          pin_registers(ds);
          wgmma_fence();
          multiply_dims<Element, kTileQ, kSlabs>(ds, v_smem, Config::kSlabBytesKeys, dout_tile,
                                                 Config::kSlabBytesQueries);
          wgmma_commit_group();
        }

        // Weights, while dp is multiplied
        [[maybe_unused]] DropoutBits<kTileQ> dropped;
        if constexpr (kDropout) dropped.draw(dropout, key_block, first_query / 16);
        wgmma_wait_group<Config::kDk ? 1 : 0>();
        pin_registers(s);
        const bool seen_by_all =
            item.first_key + first_row + kRowsPerConsumer <=
            keys_visible(first_query, p.sizes.num_queries, scores.key_count, scores.is_causal);
        weigh_keys<kModified>(s, scores, &smem.lse_log2[q_stage][2 * t], item.first_key + row,
                              first_query + 2 * t, seen_by_all);

        // A constant each: what is indexed by it must stay in registers.
        const auto finish_part = [&](auto part_constant) {
          constexpr int part = decltype(part_constant)::value;
          constexpr uint32_t part_offset = part * kPart * kRowBytes;  // in the tiles
          // dv += p^T dout
          if constexpr (Config::kDv) {
            pack_part<Element>(weights[part], s, part);
            if constexpr (kDropout) drop_weights<Element>(weights[part], dropped);
            if (part == 0) pin_registers(dv);
            pin_registers(weights[part]);
            wgmma_fence();
            multiply_rows<Element, Config::kHeadDim, kPart>(dv, weights[part],
                                                            dout_tile + part_offset);
            wgmma_commit_group();
          }

          // ds, while dv is multiplied; dk += ds^T q
          if constexpr (Config::kDk) {
            if (part == 0) {
              wgmma_wait_group<Config::kDv ? 1 : 0>();
              pin_registers(ds);
              if (!Config::kDv && lane == 0) mbarrier_arrive(smem.dout_empty[dout_stage]);
            }
#pragma unroll
            for (int n = part * kPart / 8; n < (part + 1) * kPart / 8; ++n) {
              const float2 delta =
                  *reinterpret_cast<const float2*>(&smem.delta[q_stage][8 * n + 2 * t]);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int at = 4 * n + i;
                ds[at] = score_gradient<kDropout>(s[at], ds[at], i % 2 == 0 ? delta.x : delta.y,
                                                  kDropout && dropped.is_dropped(at / 2, i % 2),
                                                  scores.keep_scale);
              }
            }
            pack_part<Element>(gradients[part], ds, part);
            if constexpr (Config::kDq) {
              hand_over_gradients<Config>(smem.ds[position % 2][consumer], gradients[part], part,
                                          position, consumer, thread);
            }
            if (part == 0) pin_registers(dk);
            pin_registers(gradients[part]);
            wgmma_fence();
            multiply_rows<Element, Config::kHeadDim, kPart>(dk, gradients[part],
                                                            q_tile + part_offset);
            wgmma_commit_group();
          }
        };
        finish_part(std::integral_constant<int, 0>{});
        if constexpr (Config::kParts == 2) finish_part(std::integral_constant<int, 1>{});

        // The tiles are free again
        if constexpr (Config::kDv) {
          wgmma_wait_group<Config::kDk ? 1 : 0>();
          pin_registers(dv);
          pin_parts(weights);
          if (lane == 0) mbarrier_arrive(smem.dout_empty[dout_stage]);
        }
        if constexpr (Config::kDk) {
          wgmma_wait_group<0>();
          pin_registers(dk);
          pin_parts(gradients);
        }
        if (lane == 0) mbarrier_arrive(smem.q_empty[q_stage]);
        if constexpr (Config::kDq) {
          const int buffer = position % 2;
          if (Config::makes_dq(buffer, consumer)) {
            add_dq<Config, Element>(p, smem, scores.batch_head, first_query, buffer, consumer,
                                    thread);
          }
        }
      }
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
        named_barrier_sync(kProductsDone, kConsumers * kWarpgroup);
        using Rows = TurningRows<Config::kHeadDim>;
        static_assert(kConsumerWarps * sizeof(Rows) <= sizeof(smem.kv) + sizeof(smem.q));
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

template <class Config, class Element, bool kDropout, bool kModified>
void launch_backward_keys(const AttentionBackwardParams& p, cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  Sm90BackwardParams params;
  params.attention = p;
  params.turns = plan_turns(p.k_rotation);
  params.q_map = make_heads_map(p.q, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                kSlabDims, Config::kTileQ);
  params.dout_map = make_heads_map(p.dout, p.dtype, s.batch, s.num_queries, s.num_heads, s.head_dim,
                                   kSlabDims, Config::kTileQ);
  params.k_map = make_heads_map(p.k, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims, kTileRows);
  params.v_map = make_heads_map(p.v, p.dtype, s.batch, s.num_keys, s.num_kv_heads, s.head_dim,
                                kSlabDims, kTileRows);
  static_assert(sizeof(KeySideStorage<Config>) <= kMaxSmemBytes);
  const int64_t blocks = ceil_div(s.num_keys, kTileRows) * s.num_kv_heads * s.batch;
  launch(attention_backward_keys_sm90_kernel<Config, Element, kDropout, kModified>,
         "attention_backward_keys_sm90", blocks, kBackwardThreads, sizeof(KeySideStorage<Config>),
         stream, params);
}

template <class Config>
void run_backward_keys(const AttentionBackwardParams& p, cudaStream_t stream) {
  choose_backward_variant(p, [&](auto element, auto dropout, auto modified) {
    launch_backward_keys<Config, decltype(element), decltype(dropout)::value,
                         decltype(modified)::value>(p, stream);
  });
}

// The same without dropout, bias, masks and removed keys.
template <class Config>
void run_plain_backward_keys(const AttentionBackwardParams& p, cudaStream_t stream) {
  p.dtype == DType::kBFloat16 ? launch_backward_keys<Config, __nv_bfloat16, false, false>(p, stream)
                              : launch_backward_keys<Config, __half, false, false>(p, stream);
}

}  // namespace frx
