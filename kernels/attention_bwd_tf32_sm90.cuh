// Attention backward on Hopper in TF32. A block keeps 64 rows a consumer warpgroup of one side,
// either keys (it makes dk and dv) or queries (dq), and walks over tiles of the other. Warpgroup 0
// drives the copy engine. Weights and score gradients go from accumulators straight into the
// products that make the results, whose other operand comes from a transposed copy: TF32 products
// want the dimension that they sum over contiguous. docs/design/hopper.md has the barriers.
#pragma once

#include <cstdint>

#include "attention_bwd_keys_sm90.cuh"
#include "attention_bwd_queries_sm90.cuh"
#include "attention_bwd_tf32_sm90_parts.cuh"
#include "attention_tf32_sm90.h"
#include "chained_launch.cuh"
#include "tensor_map.h"
#include "transpose_heads_sm90.h"

namespace frx {

// ---- the kernel -------------------------------------------------------------------------------

// kModified: a bias, a mask over scores or removed keys.
template <class Config, bool kDropout, bool kModified>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_tf32_sm90_kernel(const __grid_constant__ Tf32BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kKeySide = Config::kKeySide;
  constexpr int kTile = Config::kTile, kStages = Config::kStages, kHeadDim = Config::kHeadDim;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Tf32BackwardStorage<Config>*>(smem_bytes);
  const AttentionBackwardParams& p = params.attention;
  const int block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = block_warp / 4;

  // Barriers: a full one completes by the copies' bytes, an empty one by every consumer warp.
  if (threadIdx.x == 0) {
    mbarrier_init(smem.rows_full, 2);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(smem.columns_full[stage], kKeySide ? 3 : 2);  // the third: statistics
      mbarrier_init(smem.columns_empty[stage], 4 * Config::kConsumers);
    }
    for (int stage = 0; stage < Config::kCopyStages; ++stage) {
      mbarrier_init(smem.copies_full[stage], Config::kCopies);
      mbarrier_init(smem.copies_empty[stage], 4 * Config::kConsumers);
    }
    fence_mbarrier_init();
    for (int i = 0; i < 2; ++i) {
      prefetch_tensormap(params.rows[i]);
      prefetch_tensormap(params.columns[i]);
    }
    for (int i = 0; i < Config::kCopies; ++i) prefetch_tensormap(params.copies[i]);
  }
  __syncthreads();
  // Behind keys, whose blocks said so when everything before them was complete.
  if (!params.follows_copies) let_next_kernel_start();

  const Tf32BackwardItem item = locate_rows<Config>(p);
  const bool has_tiles = item.tiles.begin < item.tiles.end;
  if (warpgroup == 0) {
    // ---- Producer: one warp keeps the rings full ---------------------------------------------
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32 && has_tiles) produce_columns(smem, params, item, threadIdx.x);
  } else {
    // ---- Consumers: 64 rows each -------------------------------------------------------------
    setmaxnreg_inc<Config::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % kWarpgroup;
    const int lane = thread % 32, t = lane % 4;
    const int warp = block_warp - 4;  // of all consumers'
    const int first_row = consumer * kRowsPerConsumer;
    const int row = item.first_row + warp * 16 + lane / 4;
    const int row_block = item.first_row / 16 + warp;

    const SmemDescriptor score_rows =  // K or Q
        swizzled_descriptor<kRowBytes>(smem_address(smem.rows[0][0][first_row]), 0);
    const SmemDescriptor value_rows = score_rows + sizeof(smem.rows[0]);  // V or dO
    const SmemDescriptor columns = swizzled_descriptor<kRowBytes>(smem_address(smem.columns), 0);
    const SmemDescriptor copies = swizzled_descriptor<kRowBytes>(smem_address(smem.copies), 0);

    float d_rows[kHeadDim / 2] = {};                   // dk or dq
    float d_values[kKeySide ? kHeadDim / 2 : 1] = {};  // dv
    float lse_log2[2] = {}, delta[2] = {};             // of the rows, where they are queries
    if constexpr (!kKeySide) {
      const int64_t batch_head = item.batch * p.sizes.num_heads + item.head;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse_log2[r] = row_lse_log2(p, batch_head, row + 8 * r);
        delta[r] = row_delta(p, batch_head, row + 8 * r);
      }
    }
    if (has_tiles) mbarrier_wait(smem.rows_full, 0);

    uint32_t position = 0;  // in the rings
    for (int head = item.first_head; head < item.end_head; ++head) {
      const HeadScores scores(p.sizes, p.scores, item.batch, head);
      [[maybe_unused]] const DropoutLane<kKeySide> dropout(
          kDropout ? scores.seed() : 0, scores.batch_head, scores.keep_threshold, lane / 4, t);
      const bool has_holes = kModified && scores.key_keep != nullptr;
      const bool is_cut = scores.key_count < p.sizes.num_keys;
      const auto clear_absent_keys = [&](auto& tiles, int begin, int end, int first_key) {
        // NaN in a key that does not exist must not spread.
        if (!has_holes && !(is_cut && first_key + end > scores.key_count)) return;
        for (int i = 0; i < 2; ++i) {
          clear_absent_rows(tiles[i], begin, end, thread,
                            [&](int key) { return scores.key_exists(first_key + key); });
        }
        fence_proxy_async();
        named_barrier_sync(kConsumerBarrier + consumer, kWarpgroup);
      };
      if (kKeySide && position == 0 && has_tiles) {
        clear_absent_keys(smem.rows, first_row, first_row + kRowsPerConsumer, item.first_row);
      }

      for (int tile = item.tiles.begin; tile < item.tiles.end; ++tile, ++position) {
        const int first_column = tile * kTile;
        const uint32_t stage = position % kStages;
        const SmemDescriptor score_columns = columns + stage * sizeof(smem.columns[0]);
        const SmemDescriptor value_columns = score_columns + sizeof(smem.columns[0][0]);
        const uint32_t copy_stage = position % Config::kCopyStages;
        const SmemDescriptor score_copy = copies + copy_stage * sizeof(smem.copies[0]);
        float s[kTile / 2], ds[kTile / 2];
        uint32_t weights[kKeySide ? kTile / 2 : 1], gradients[kTile / 2];

        // s = q k^T and dp = dout v^T, transposed where rows are keys
        mbarrier_wait(smem.columns_full[stage], position / kStages & 1);
        // All consumers write the same zeros, so they need not meet.
        if constexpr (!kKeySide) clear_absent_keys(smem.columns[stage], 0, kTile, first_column);
        pin_registers(s);
        wgmma_fence();
        multiply_tf32_dims<kTile, kHeadDim, Config::kRows>(s, score_rows, score_columns);
        wgmma_commit_group();
        pin_registers(ds);
        wgmma_fence();
        multiply_tf32_dims<kTile, kHeadDim, Config::kRows>(ds, value_rows, value_columns);
        wgmma_commit_group();

        // Weights, while dp is multiplied
        [[maybe_unused]] DropoutBits<kTile> dropped;
        if constexpr (kDropout) dropped.draw(dropout, row_block, first_column / 16);
        wgmma_wait_group<1>();
        pin_registers(s);
        if constexpr (kKeySide) {
          const bool seen_by_all =
              item.first_row + first_row + kRowsPerConsumer <=
              keys_visible(first_column, p.sizes.num_queries, scores.key_count, scores.is_causal);
          weigh_keys<kModified>(s, scores, &smem.lse_log2[stage][2 * t], row, first_column + 2 * t,
                                seen_by_all);
        } else {
          const bool seen_by_all =
              first_column + kTile <= keys_visible(item.first_row + first_row, p.sizes.num_queries,
                                                   scores.key_count, scores.is_causal);
          weigh_queries<kModified>(s, scores, lse_log2, row, first_column + 2 * t, seen_by_all);
        }

        // dv += p^T dout
        if constexpr (kKeySide) {
          pack_weights<Tf32>(weights, s);
          if constexpr (kDropout) drop_weights<Tf32>(weights, dropped);
          mbarrier_wait(smem.copies_full[copy_stage], position / Config::kCopyStages & 1);
          pin_registers(d_values);
          pin_registers(weights);
          wgmma_fence();
          multiply_tf32_tokens<kHeadDim, kTile>(d_values, weights,
                                                score_copy + sizeof(smem.copies[0][0]));
          wgmma_commit_group();
        }

        // ds, while dv is multiplied; dk += ds^T q, or dq += ds k
        wgmma_wait_group<kKeySide ? 1 : 0>();
        pin_registers(ds);
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i) {
          float mean = delta[i / 2 % 2];
          if constexpr (kKeySide) mean = smem.delta[stage][8 * (i / 4) + 2 * t + i % 2];
          ds[i] = score_gradient<kDropout>(
              s[i], ds[i], mean, kDropout && dropped.is_dropped(i / 2, i % 2), scores.keep_scale);
        }
        pack_weights<Tf32>(gradients, ds);
        if constexpr (!kKeySide) {
          mbarrier_wait(smem.copies_full[copy_stage], position / Config::kCopyStages & 1);
        }
        pin_registers(d_rows);
        pin_registers(gradients);
        wgmma_fence();
        multiply_tf32_tokens<kHeadDim, kTile>(d_rows, gradients, score_copy);
        wgmma_commit_group();
        if (lane == 0) mbarrier_arrive(smem.columns_empty[stage]);
        wgmma_wait_group<0>();
        pin_registers(d_rows);
        pin_registers(gradients);
        if constexpr (kKeySide) {
          pin_registers(d_values);
          pin_registers(weights);
        }
        if (lane == 0) mbarrier_arrive(smem.copies_empty[copy_stage]);
      }
    }

    // The kernel after this one relies on those before it as well.
    wait_for_previous_kernel();
    const int num_rows = kKeySide ? p.sizes.num_keys : p.sizes.num_queries;
    store_tf32_heads(kKeySide ? p.dk : p.dq, d_rows, p.scores.scale, item.batch, item.head, row,
                     num_rows, p.sizes.head_dim, t);
    if constexpr (kKeySide) {
      store_tf32_heads(p.dv, d_values, kDropout ? p.scores.keep_scale : 1.f, item.batch, item.head,
                       row, num_rows, p.sizes.head_dim, t);
    }
  }
#else
  __trap();
#endif
}

// ---- launcher ---------------------------------------------------------------------------------

template <class Config, bool kDropout, bool kModified>
void launch_backward_tf32(const AttentionBackwardParams& p, bool follows_copies,
                          cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  const Tf32BackwardCopies copies = tf32_backward_copies(p);
  const auto heads_map = [&](const HeadsView& view, bool of_keys, int box_tokens) {
    return make_heads_map(view, p.dtype, s.batch, of_keys ? s.num_keys : s.num_queries,
                          of_keys ? s.num_kv_heads : s.num_heads, s.head_dim, kTf32SlabWidth,
                          box_tokens);
  };
  const auto copy_map = [&](float* data, bool of_keys) {
    const int tokens = of_keys ? s.num_keys : s.num_queries;
    const int heads = of_keys ? s.num_kv_heads : s.num_heads;
    return make_heads_map(transposed_view(data, tokens, heads, s.head_dim), p.dtype, s.batch,
                          s.head_dim, heads, static_cast<int>(padded_tokens(tokens)),
                          kTf32SlabWidth, Config::kHeadDim);
  };
  constexpr bool kKeySide = Config::kKeySide;
  Tf32BackwardParams params;
  params.attention = p;
  params.follows_copies = follows_copies;
  params.rows[0] = heads_map(kKeySide ? p.k : p.q, kKeySide, Config::kRows);
  params.rows[1] = heads_map(kKeySide ? p.v : p.dout, kKeySide, Config::kRows);
  params.columns[0] = heads_map(kKeySide ? p.q : p.k, !kKeySide, Config::kTile);
  params.columns[1] = heads_map(kKeySide ? p.dout : p.v, !kKeySide, Config::kTile);
  params.copies[0] = copy_map(kKeySide ? copies.q : copies.k, !kKeySide);
  params.copies[1] = kKeySide ? copy_map(copies.dout, false) : params.copies[0];

  using Storage = Tf32BackwardStorage<Config>;
  static_assert(sizeof(Storage) <= kMaxSmemBytes);
  const int64_t blocks = s.batch * (kKeySide ? s.num_kv_heads : s.num_heads) *
                         ceil_div(kKeySide ? s.num_keys : s.num_queries, Config::kRows);
  launch_chained(attention_backward_tf32_sm90_kernel<Config, kDropout, kModified>,
                 "attention_backward_tf32_sm90", blocks, Config::kThreads, sizeof(Storage), stream,
                 params);
}

// Modified: the tiles where a bias or masks need registers.
template <class Plain, class Modified>
void run_backward_tf32(const AttentionBackwardParams& p, bool follows_copies, cudaStream_t stream) {
  const ScoreModifiers& m = p.scores;
  const bool has_dropout = m.seed != nullptr;
  if (is_modified(m) && has_dropout) {
    launch_backward_tf32<Modified, true, true>(p, follows_copies, stream);
  } else if (is_modified(m)) {
    launch_backward_tf32<Modified, false, true>(p, follows_copies, stream);
  } else if (has_dropout) {
    launch_backward_tf32<Plain, true, false>(p, follows_copies, stream);
  } else {
    launch_backward_tf32<Plain, false, false>(p, follows_copies, stream);
  }
}

}  // namespace frx
