// Cutting along the queries: where the last wave of the Hopper backward's blocks of keys would
// leave most of the GPU idle, each of its blocks becomes several, which share its query tiles.
// Their parts of dk and dv are added up by the kernel that sums those of dq. Nothing here needs
// CUDA or a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host_device.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

constexpr int kKeysPerBlock = 128;

// Whether the block of that index in the grid has a part of its keys' queries only.
FRX_HOST_DEVICE bool is_piece(const KeyCut& cut, int index) {
  return cut.pieces > 1 && index >= cut.first_block;
}

struct KeyBlock {
  int block;  // before any was cut
  int piece;
};

FRX_HOST_DEVICE KeyBlock key_block_of(const KeyCut& cut, int index) {
  if (!is_piece(cut, index)) return {index, 0};
  const int beyond = index - cut.first_block;
  return {cut.first_block + beyond / cut.pieces, beyond % cut.pieces};
}

inline int64_t key_blocks(const AttentionSizes& s) {
  return s.batch * s.num_kv_heads * ceil_div(s.num_keys, kKeysPerBlock);
}

inline int64_t num_pieces(const AttentionSizes& s, const KeyCut& cut) {
  return cut.pieces > 1 ? (key_blocks(s) - cut.first_block) * cut.pieces : 0;
}

// Of the grid.
inline int64_t key_blocks(const AttentionSizes& s, const KeyCut& cut) {
  return cut.pieces > 1 ? cut.first_block + num_pieces(s, cut) : key_blocks(s);
}

// Parts of dk and of dv; of the latter only where dk has none.
inline int64_t dkv_part_floats(const AttentionSizes& s, const KeyCut& cut, int padded_dim,
                               int gradients = 2) {
  return num_pieces(s, cut) * gradients * kKeysPerBlock * padded_dim;
}

// Those that are cut.
inline IndexRange cut_blocks(const AttentionSizes& s, const KeyCut& cut) {
  return {cut.first_block, static_cast<int>(key_blocks(s))};
}

// The grid's first block that has queries of that block's keys.
inline int64_t grid_index(const KeyCut& cut, int64_t block) {
  return cut.pieces > 1 && block > cut.first_block
             ? cut.first_block + (block - cut.first_block) * cut.pieces
             : block;
}

// Which blocks to cut, if that is worth it. Lengths are the device's to know: every key counts.
inline KeyCut cut_last_wave(const AttentionSizes& s, bool is_causal, int padded_dim, int num_sms,
                            int gradients = 2) {
  // All times in microseconds on an H200.
  const double tile_time =  // of 64 queries
      padded_dim == 32    ? 1.25
      : padded_dim == 64  ? 1.65
      : padded_dim == 128 ? 2.6
                          : 2.4;
  constexpr double kBlockOverhead = 3.5;  // loading K and V, filling the pipeline, results
  constexpr double kSumOverhead = 2.0;    // a further launch, or a longer one
  constexpr double kPartTime = 0.3;       // of which a warp adds one after the other
  constexpr double kBytesPerSm = 30e3;    // a microsecond, when every multiprocessor reads
  constexpr double kLeastGain = 0.1;      // less than that the model does not know
  constexpr int kTileQueries = 64, kMaxPieces = 32;
  constexpr int64_t kMostPartFloats = int64_t{1} << 24;  // 64 MiB

  const KeyCut none = {0, 1};
  const int64_t blocks = key_blocks(s), whole_waves = blocks / num_sms;
  const int64_t last_wave = blocks % num_sms;
  // Causal: blocks differ in length, and the short ones make room for the last early on.
  if (is_causal || last_wave == 0 || kLeastGain * (whole_waves + 1) > 1) return none;

  const int group = s.num_heads / s.num_kv_heads;
  const int query_tiles = ceil_div(s.num_queries, kTileQueries);
  const auto block_time = [&](int pieces) {  // of the longest piece
    return kBlockOverhead + tile_time * group * ceil_div(query_tiles, pieces);
  };
  const double whole_time = whole_waves * block_time(1);
  const double uncut_time = whole_time + block_time(1);
  KeyCut best = none;
  double best_time = (1 - kLeastGain) * uncut_time;
  for (int pieces = 2; pieces <= std::min(kMaxPieces, query_tiles); ++pieces) {
    const KeyCut cut = {static_cast<int32_t>(whole_waves * num_sms), pieces};
    if (dkv_part_floats(s, cut, padded_dim, gradients) > kMostPartFloats) break;
    const int64_t waves = ceil_div(last_wave * pieces, static_cast<int64_t>(num_sms));
    // Every part is written and read.
    const double bytes = 2.0 * sizeof(float) * dkv_part_floats(s, cut, padded_dim, gradients);
    const double time = whole_time + waves * block_time(pieces) + kSumOverhead +
                        pieces * kPartTime + bytes / (num_sms * kBytesPerSm);
    if (time < best_time) {
      best = cut;
      best_time = time;
    }
  }
  return best;
}

}  // namespace frx
