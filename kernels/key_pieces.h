// Cutting along the queries: where the last wave of the Hopper backward's blocks of keys would
// leave much of the GPU idle, each of its blocks becomes several, which share its query tiles:
// equally, or (in windows of score gradients) so that every multiprocessor has as many tiles.
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

// Parts of dk and of dv.
inline int64_t dkv_part_floats(const AttentionSizes& s, const KeyCut& cut, int padded_dim) {
  return num_pieces(s, cut) * 2 * kKeysPerBlock * padded_dim;
}

// ---- shares -----------------------------------------------------------------------------------

// Blocks count from the first one that is cut.
FRX_HOST_DEVICE int first_share(const KeyShares& cut, int block) {
  return block * cut.stride / cut.share;
}

// Where the parts of a block's pieces are, among those of all blocks that are cut. A share that
// ends one block and begins the next has two.
FRX_HOST_DEVICE IndexRange parts_of_block(const KeyShares& cut, int block) {
  const int before = cut.stride % cut.share == 0 ? 0 : block;
  return {before + first_share(cut, block),
          before + ceil_div(block * cut.stride + cut.tiles, cut.share)};
}

FRX_HOST_DEVICE IndexRange tiles_of_piece(const KeyShares& cut, int block, int piece) {
  const int begin = (first_share(cut, block) + piece) * cut.share - block * cut.stride;
  return {larger(begin, 0), smaller(begin + cut.share, cut.tiles)};
}

// Blocks that are cut, whose parts are there.
struct CutKeys {
  IndexRange blocks;
  KeyShares shares;
};

// Equal pieces are shares of one, whatever their tiles.
inline CutKeys cut_blocks(const AttentionSizes& s, const KeyCut& cut) {
  return {{cut.first_block, static_cast<int>(key_blocks(s))}, {cut.pieces, cut.pieces, 1}};
}

// A block and a piece, in the order of the grid.
struct CutPiece {
  uint8_t block, piece;
};

constexpr int kMostPieces = 512;  // 64 MiB of parts of dv with 256 dims
constexpr int kMostCutBlocks = 256, kMostPiecesOfBlock = 32;

struct PieceOrder {
  CutPiece pieces[kMostPieces];
  int count;
};

// The longest ones start first: where two share what a multiprocessor has, the hardware, which
// hands out blocks in order, then puts the shortest of the later ones behind the longest.
inline PieceOrder order_pieces(const KeyShares& cut, int blocks) {
  PieceOrder order = {};
  for (int block = 0; block < blocks; ++block) {
    const IndexRange parts = parts_of_block(cut, block);
    for (int piece = 0; piece < parts.end - parts.begin; ++piece) {
      order.pieces[order.count++] = {static_cast<uint8_t>(block), static_cast<uint8_t>(piece)};
    }
  }
  const auto length = [&](const CutPiece& p) {
    const IndexRange tiles = tiles_of_piece(cut, p.block, p.piece);
    return tiles.end - tiles.begin;
  };
  std::stable_sort(order.pieces, order.pieces + order.count,
                   [&](const CutPiece& a, const CutPiece& b) { return length(a) > length(b); });
  return order;
}

// ---- the plan ---------------------------------------------------------------------------------

// All times in microseconds on an H200.
constexpr double kKeyBlockOverhead = 3.5;  // loading K and V, filling the pipeline, results
constexpr double kLeastGain = 0.1;         // less than that the model does not know

constexpr double key_tile_time(int padded_dim) {  // of 64 queries
  return padded_dim == 32 ? 1.25 : padded_dim == 64 ? 1.65 : padded_dim == 128 ? 2.6 : 2.4;
}

// Every part is written and read.
inline double parts_time(int64_t floats, int parts_of_block, int num_sms) {
  constexpr double kSumOverhead = 2.0;  // a further launch, or a longer one
  constexpr double kPartTime = 0.3;     // of which a warp adds one after the other
  constexpr double kBytesPerSm = 30e3;  // a microsecond, when every multiprocessor reads
  return kSumOverhead + parts_of_block * kPartTime +
         2.0 * sizeof(float) * floats / (num_sms * kBytesPerSm);
}

// Which blocks to cut, if that is worth it. Lengths are the device's to know: every key counts.
inline KeyCut cut_last_wave(const AttentionSizes& s, bool is_causal, int padded_dim, int num_sms) {
  constexpr int kTileQueries = 64;
  constexpr int64_t kMostPartFloats = int64_t{1} << 24;  // 64 MiB

  const KeyCut none = {0, 1};
  const int64_t blocks = key_blocks(s), whole_waves = blocks / num_sms;
  const int64_t last_wave = blocks % num_sms;
  // Causal: blocks differ in length, and the short ones make room for the last early on.
  if (is_causal || last_wave == 0 || kLeastGain * (whole_waves + 1) > 1) return none;

  const int group = s.num_heads / s.num_kv_heads;
  const int query_tiles = ceil_div(s.num_queries, kTileQueries);
  const auto block_time = [&](int pieces) {  // of the longest piece
    return kKeyBlockOverhead + key_tile_time(padded_dim) * group * ceil_div(query_tiles, pieces);
  };
  const double whole_time = whole_waves * block_time(1);
  const double uncut_time = whole_time + block_time(1);
  KeyCut best = none;
  double best_time = (1 - kLeastGain) * uncut_time;
  for (int pieces = 2; pieces <= std::min(kMostPiecesOfBlock, query_tiles); ++pieces) {
    const KeyCut cut = {static_cast<int32_t>(whole_waves * num_sms), pieces};
    if (dkv_part_floats(s, cut, padded_dim) > kMostPartFloats) break;
    const int64_t waves = ceil_div(last_wave * pieces, static_cast<int64_t>(num_sms));
    const double time = whole_time + waves * block_time(pieces) +
                        parts_time(dkv_part_floats(s, cut, padded_dim), pieces, num_sms);
    if (time < best_time) {
      best = cut;
      best_time = time;
    }
  }
  return best;
}

}  // namespace frx
