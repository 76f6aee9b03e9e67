// Host side of the Hopper attention kernels: what they take, how keys are split, which one runs.
#include "attention_sm90.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "gradient_windows.h"
#include "key_pieces.h"
#include "tensor_map.h"
#include "transpose_heads_sm90.h"

namespace frx {

namespace {

int64_t tiles_of(int64_t count, int64_t tile) { return (count + tile - 1) / tile; }

// V is read transposed in TF32.
void transpose_values(const AttentionForwardParams& p, cudaStream_t stream) {
  const AttentionSizes& s = p.sizes;
  const HeadsTranspose values = {
      p.v,        p.v_transposed,      s.batch,          s.num_keys, s.num_kv_heads,
      s.head_dim, p.scores.kv_lengths, p.scores.key_keep};
  transpose_heads_sm90(&values, 1, stream);
}

}  // namespace

const char* attention_forward_sm90_obstacle(const AttentionForwardParams& p) {
  const AttentionSizes& s = p.sizes;
  const bool is_tf32 = p.dtype == DType::kTF32;
  const int element_bytes = is_tf32 ? 4 : 2;
  if (p.dtype == DType::kFloat32) {
    return "the Hopper kernel multiplies bf16, fp16 and TF32 only";
  }
  if (s.head_dim % 8 != 0 || s.head_dim > 256) {
    return "the Hopper kernel needs a head dim that is a multiple of 8 and at most 256";
  }
  if (is_tf32 && s.head_dim > 128)
    return "the Hopper kernel needs a head dim of at most 128 in TF32";
  if (s.num_keys == 0) return "there are no keys";
  if (!is_tensor_map_possible(p.q, s.batch, s.num_queries, s.num_heads, element_bytes) ||
      !is_tensor_map_possible(p.k, s.batch, s.num_keys, s.num_kv_heads, element_bytes) ||
      !is_tensor_map_possible(p.v, s.batch, s.num_keys, s.num_kv_heads, element_bytes)) {
    return "the copy engine needs 16-byte aligned rows and no broadcast (stride 0) dimension";
  }
  if (is_tf32 && !is_transposable(s.batch, s.num_keys, s.num_kv_heads, s.head_dim)) {
    return "the values are too many for one pass over them";
  }
  const Sm90ForwardTile tile = sm90_forward_tile(p.dtype, s.head_dim, s.num_queries);
  // A variant may use a smaller tile than the table's, hence the margin of four.
  const int64_t query_tiles = tiles_of(s.num_queries, tile.queries);
  if (query_tiles > INT32_MAX / 4 / s.num_heads / std::max(1, p.num_splits) ||
      query_tiles * s.num_heads * std::max(1, p.num_splits) * s.batch > INT32_MAX / 4) {
    return "there are more query tiles than a 32-bit index counts";
  }
  return nullptr;
}

bool attention_forward_sm90_pays(const AttentionForwardParams& p) {
  if (p.dtype != DType::kTF32) return true;
  // The pass over V and its launch take some 3 us; the portable kernel does 2e8 in 4.
  constexpr int kMinQueries = 64;
  constexpr double kMinFlops = 2e8;
  const AttentionSizes& s = p.sizes;
  return s.num_queries >= kMinQueries && 4.0 * static_cast<double>(s.batch) * s.num_heads *
                                                 s.num_queries * s.num_keys * s.head_dim >=
                                             kMinFlops;
}

int attention_forward_sm90_splits(const AttentionSizes& sizes, DType dtype, int num_sms) {
  // All times in microseconds on an H200.
  const bool is_tf32 = dtype == DType::kTF32;
  const double kFlopsPerSm = is_tf32 ? 2.2e6 : 4.5e6;  // a microsecond, at the kernel's rate
  constexpr double kBytesPerSm = 30e3;      // a microsecond, when every multiprocessor reads
  constexpr double kItemOverhead = 2.0;     // filling the pipeline, writing the result
  constexpr double kCombineOverhead = 2.0;  // a second launch
  constexpr int kMaxSplits = 64;

  const Sm90ForwardTile tile = sm90_forward_tile(dtype, sizes.head_dim, sizes.num_queries);
  const int64_t query_tiles = std::max<int64_t>(
      1, sizes.batch * sizes.num_heads * tiles_of(sizes.num_queries, tile.queries));
  const int64_t key_tiles = tiles_of(sizes.num_keys, tile.keys);
  const double multiply_time =
      4.0 * tile.queries * tile.keys * std::max(sizes.head_dim, 32) / kFlopsPerSm;
  // A query tile alone with its keys reads them from memory; several share them through L2.
  const double tile_bytes = (is_tf32 ? 8.0 : 4.0) * tile.keys * sizes.head_dim;
  const double load_time = sizes.num_queries <= tile.queries ? tile_bytes / kBytesPerSm : 0.0;
  const double tile_time = std::max(multiply_time, load_time);
  const double partial_bytes = 2.0 * sizeof(float) * static_cast<double>(sizes.batch) *
                               sizes.num_heads * sizes.num_queries * sizes.head_dim;
  int best = 1;
  double best_time = 0;
  for (int splits = 1; splits <= std::min<int64_t>(kMaxSplits, key_tiles); ++splits) {
    // Every block that runs at once takes its share of the multiprocessor.
    const int64_t blocks_per_sm =
        std::min<int64_t>(tile.blocks_per_sm, tiles_of(query_tiles * splits, num_sms));
    const int64_t waves = tiles_of(query_tiles * splits, num_sms * blocks_per_sm);
    double time = waves * (tiles_of(key_tiles, splits) * tile_time * blocks_per_sm + kItemOverhead);
    if (splits > 1) time += kCombineOverhead + splits * partial_bytes / (num_sms * kBytesPerSm);
    if (splits == 1 || time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

void run_attention_forward_sm90(const AttentionForwardParams& params, cudaStream_t stream) {
  const AttentionSizes& sizes = params.sizes;
  if (sizes.batch == 0 || sizes.num_queries == 0 || sizes.num_heads == 0) return;
  if (const char* obstacle = attention_forward_sm90_obstacle(params)) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + obstacle);
  }
  if (params.dtype == DType::kTF32) {
    if (!params.has_transposed) transpose_values(params, stream);
    if (sizes.head_dim <= 32) return attention_forward_tf32_sm90_d32(params, stream);
    if (sizes.head_dim <= 64) return attention_forward_tf32_sm90_d64(params, stream);
    return attention_forward_tf32_sm90_d128(params, stream);
  }
  if (sizes.head_dim <= 32) return attention_forward_sm90_d32(params, stream);
  if (sizes.head_dim <= 64) return attention_forward_sm90_d64(params, stream);
  if (sizes.head_dim <= 128) return attention_forward_sm90_d128(params, stream);
  attention_forward_sm90_d256(params, stream);
}

const char* attention_backward_sm90_obstacle(const AttentionBackwardParams& p) {
  const AttentionSizes& s = p.sizes;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return "the Hopper kernels multiply bf16 and fp16 only";
  }
  if (s.head_dim % 8 != 0 || s.head_dim > 256) {
    return "the Hopper kernels need a head dim that is a multiple of 8 and at most 256";
  }
  if (s.num_keys == 0 || s.num_queries == 0) return "there are no keys or no queries";
  if (!is_tensor_map_possible(p.q, s.batch, s.num_queries, s.num_heads) ||
      !is_tensor_map_possible(p.dout, s.batch, s.num_queries, s.num_heads) ||
      !is_tensor_map_possible(p.k, s.batch, s.num_keys, s.num_kv_heads) ||
      !is_tensor_map_possible(p.v, s.batch, s.num_keys, s.num_kv_heads)) {
    return "the copy engine needs 16-byte aligned rows and no broadcast (stride 0) dimension";
  }
  return nullptr;
}

namespace {

int backward_padded_dim(int head_dim) {
  return head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// Over how many blocks to split the keys of a query tile, so that whole waves fill the GPU.
int split_keys_of_dq(const AttentionSizes& sizes, int num_sms) {
  // All times in microseconds on an H200.
  constexpr double kFlopsPerSm = 4.0e6;   // a microsecond, at the rate the kernel reaches
  constexpr double kBytesPerSm = 30e3;    // a microsecond, when every multiprocessor reads
  constexpr double kBlockOverhead = 3.0;  // loading Q and dO, writing the result
  constexpr double kSumOverhead = 2.0;    // a further launch
  constexpr int kTileQueries = 128, kMinKeys = 256, kMaxSplits = 64;

  const int64_t query_tiles = std::max<int64_t>(
      1, sizes.batch * sizes.num_heads * tiles_of(sizes.num_queries, kTileQueries));
  const double key_time = 6.0 * kTileQueries * backward_padded_dim(sizes.head_dim) / kFlopsPerSm;
  const double part_bytes = 2.0 * sizeof(float) * static_cast<double>(sizes.batch) *
                            sizes.num_heads * sizes.num_queries * sizes.head_dim;
  int best = 1;
  double best_time = 0;
  for (int splits = 1; splits <= std::min<int64_t>(kMaxSplits, tiles_of(sizes.num_keys, kMinKeys));
       ++splits) {
    const int64_t waves = tiles_of(query_tiles * splits, num_sms);
    double time = waves * (key_time * sizes.num_keys / splits + kBlockOverhead);
    if (splits > 1) time += kSumOverhead + splits * part_bytes / (num_sms * kBytesPerSm);
    if (splits == 1 || time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

int64_t dq_part_floats(const AttentionSizes& s) {
  return s.batch * s.num_heads * tiles_of(s.num_queries, 64) * 64 * backward_padded_dim(s.head_dim);
}

Sm90BackwardPlan plan_with_windows(const AttentionSizes& s, int padded_dim, WindowPlan windows,
                                   int num_sms) {
  const int splits = dq_splits_of_windows(s, windows.blocks, num_sms);
  split_windows(windows, s, splits, num_sms);
  return {false,
          splits,
          splits * dq_part_floats(s),
          {0, 1},
          window_part_floats(s, windows, padded_dim),
          windows,
          windows.blocks * window_block_bytes(s)};
}

}  // namespace

Sm90BackwardPlan plan_attention_backward_sm90(const AttentionBackwardParams& p, int num_sms) {
  const bool wants_dq = p.dq.data != nullptr, wants_dkv = p.dk.data != nullptr;
  const int padded_dim = backward_padded_dim(p.sizes.head_dim);
  if (wants_dq && wants_dkv && p.sizes.head_dim > 128 && !p.scores.is_causal &&
      !is_modified(p.scores)) {
    const WindowPlan windows = plan_windows(p.sizes, padded_dim, num_sms);
    if (windows.blocks > 0) return plan_with_windows(p.sizes, padded_dim, windows, num_sms);
  }
  KeyCut cut = {0, 1};
  if (wants_dkv) cut = cut_last_wave(p.sizes, p.scores.is_causal, padded_dim, num_sms);
  const int64_t dkv_floats = dkv_part_floats(p.sizes, cut, padded_dim);
  // With 256 dims no registers are left for dq beside dk and dv.
  if (wants_dq && wants_dkv && !p.deterministic && p.sizes.head_dim <= 128) {
    return {true, 1, dq_part_floats(p.sizes), cut, dkv_floats, {}, 0};
  }
  const int splits = wants_dq ? split_keys_of_dq(p.sizes, num_sms) : 1;
  return {false, splits, splits > 1 ? splits * dq_part_floats(p.sizes) : 0, cut, dkv_floats, {}, 0};
}

void run_attention_backward_sm90(const AttentionBackwardParams& params, cudaStream_t stream) {
  const AttentionSizes& sizes = params.sizes;
  if (sizes.batch == 0 || sizes.num_heads == 0) return;
  if (const char* obstacle = attention_backward_sm90_obstacle(params)) {
    throw std::runtime_error(std::string("fused_rope_xattn: ") + obstacle);
  }
  if (sizes.head_dim <= 32) {
    attention_backward_sm90_d32(params, stream);
  } else if (sizes.head_dim <= 64) {
    attention_backward_sm90_d64(params, stream);
  } else if (sizes.head_dim <= 128) {
    attention_backward_sm90_d128(params, stream);
  } else if (params.windows.blocks > 0) {
    attention_backward_sm90_windows_d256(params, stream);
  } else {
    attention_backward_sm90_d256(params, stream);
  }
  if (params.windows.blocks > 0) return;
  if (params.dq_parts != nullptr || params.dkv_parts != nullptr) {
    attention_backward_sm90_sum(params, cut_blocks(sizes, params.key_cut), stream);
  }
}

}  // namespace frx
