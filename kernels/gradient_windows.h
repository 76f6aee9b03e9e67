// Windows of score gradients. With 256 dims a thread's registers hold one of dq, dk and dv: three
// kernels would each make the scores anew, eight products where five are needed. Instead the kernel
// for dv writes the score gradients of some blocks of keys, a window, and a second kernel makes dk
// and dq of them; then the next window takes its place. Nothing here needs CUDA or a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "key_pieces.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

constexpr int64_t kMostWindowBytes = int64_t{160} << 20;  // whatever the problem
constexpr int kWindowTile = 64;      // rows of the side that the second kernel walks over
constexpr int kWindowQueries = 128;  // of a block for dq

inline int64_t window_block_bytes(const AttentionSizes& s) {
  const int64_t padded_queries = ceil_div(s.num_queries, 64) * int64_t{64};
  return s.num_heads / s.num_kv_heads * padded_queries * kKeysPerBlock * 2;
}

// Whether three products saved of a tile of 64 queries and a block of keys outweigh what a window
// takes beside its products: two launches or three, filling their pipelines, and, where its blocks
// are fewer than half of the multiprocessors, those that wait for the blocks for dk, which are not
// cut.
inline bool windows_pay(const AttentionSizes& s, int64_t blocks, int num_sms) {
  constexpr double kSavedTime = 1.9;        // of a multiprocessor, in microseconds on an H200
  constexpr double kWindowOverhead = 20.0;  // likewise
  constexpr double kStepTime = 0.86;        // of the second kernel
  const int64_t all = key_blocks(s), windows = ceil_div(all, blocks);
  const double block_tiles =
      static_cast<double>(s.num_heads / s.num_kv_heads) * ceil_div(s.num_queries, kWindowTile);
  const double idle = 1 - 2.0 * static_cast<double>(all) / static_cast<double>(windows) / num_sms;
  return kSavedTime * block_tiles * all / num_sms >
         (kWindowOverhead + kStepTime * block_tiles * std::max(0.0, idle)) * windows;
}

// Shares that are a block's own.
inline KeyShares equal_shares(int tiles, int pieces) {
  const int share = ceil_div(tiles, pieces);
  return {tiles, ceil_div(tiles, share) * share, share};
}

// One of each multiprocessor, which may end a block and begin the next.
inline KeyShares even_shares(int tiles, int blocks, int num_sms) {
  return {tiles, tiles, ceil_div(blocks * tiles, num_sms)};
}

// How long the kernel for dv takes for blocks that are cut, and the sum of its parts; infinite
// where pieces would be too many.
inline double cut_time(const AttentionSizes& s, const KeyShares& cut, int blocks, int padded_dim,
                       int num_sms) {
  const bool is_own = cut.stride % cut.share == 0;
  const int group = s.num_heads / s.num_kv_heads, parts = parts_of_block(cut, blocks - 1).end;
  const int block_parts = ceil_div(cut.tiles, cut.share) + (is_own ? 0 : 1);
  if (blocks > kMostCutBlocks || parts > kMostPieces || block_parts > kMostPiecesOfBlock ||
      (is_own && parts > num_sms)) {
    return std::numeric_limits<double>::infinity();
  }
  return (is_own ? 1 : 2) * kKeyBlockOverhead + key_tile_time(padded_dim) * group * cut.share +
         parts_time(int64_t{parts} * kKeysPerBlock * padded_dim, block_parts, num_sms);
}

// Whole waves stay whole. The blocks beyond are cut if that gains something, into shares of their
// own while pieces are no more than multiprocessors, or into one of each multiprocessor.
inline WindowCut cut_window(const AttentionSizes& s, int64_t blocks, int padded_dim, int num_sms) {
  const int last_wave = static_cast<int>(blocks % num_sms);
  const int tiles = ceil_div(s.num_queries, kWindowTile), group = s.num_heads / s.num_kv_heads;
  const WindowCut none = {static_cast<int32_t>(blocks), {1, 1, 1}, 0};
  if (last_wave == 0) return none;
  const double uncut_time = kKeyBlockOverhead + key_tile_time(padded_dim) * group * tiles;
  WindowCut best = none;
  double best_time = (1 - kLeastGain) * uncut_time;
  const auto consider = [&](const KeyShares& shares) {
    const double time = cut_time(s, shares, last_wave, padded_dim, num_sms);
    if (time >= best_time) return;
    best = {static_cast<int32_t>(blocks - last_wave), shares, 0};
    best_time = time;
  };
  for (int pieces = 2; pieces <= std::min({kMostPiecesOfBlock, tiles, num_sms / last_wave});
       ++pieces) {
    consider(equal_shares(tiles, pieces));
  }
  consider(even_shares(tiles, last_wave, num_sms));
  return best;
}

// Whole waves of blocks if these find room; if not, as few windows as find room, of one size. At
// least two of them: a problem's score gradients are never there all at once. 0: that cannot be.
inline int64_t blocks_of_windows(const AttentionSizes& s, int num_sms) {
  const int64_t all = key_blocks(s), most = kMostWindowBytes / window_block_bytes(s);
  if (most >= num_sms) {
    const int64_t waves = std::max<int64_t>(1, std::min(most, all / 2) / num_sms);
    return all > waves * num_sms ? waves * num_sms : 0;
  }
  if (most == 0 || all < 2) return 0;
  return ceil_div(all, std::max<int64_t>(2, ceil_div(all, most)));
}

inline WindowPlan plan_windows(const AttentionSizes& s, int padded_dim, int num_sms) {
  if (s.num_queries == 0) return {};
  const int64_t blocks = blocks_of_windows(s, num_sms);
  if (blocks == 0 || !windows_pay(s, blocks, num_sms)) return {};
  const int64_t all = key_blocks(s), full = (all - 1) / blocks;  // windows before the last one
  return {static_cast<int32_t>(blocks), cut_window(s, blocks, padded_dim, num_sms),
          cut_window(s, all - full * blocks, padded_dim, num_sms)};
}

// Those of its blocks that are cut.
FRX_HOST_DEVICE CutKeys cut_blocks(const WindowCut& cut, int first_block, int end_block) {
  return {{first_block + cut.whole_blocks, end_block}, cut.shares};
}

inline int64_t num_parts(const CutKeys& cut) {
  const int blocks = cut.blocks.end - cut.blocks.begin;
  return blocks > 0 ? parts_of_block(cut.shares, blocks - 1).end : 0;
}

// Parts of dv, which are added up window by window.
inline int64_t window_part_floats(const AttentionSizes& s, const WindowPlan& plan, int padded_dim) {
  const int64_t last_blocks = (key_blocks(s) - 1) % plan.blocks + 1;
  const int64_t parts =
      std::max(num_parts(cut_blocks(plan.cut, 0, plan.blocks)),
               num_parts(cut_blocks(plan.last_cut, 0, static_cast<int>(last_blocks))));
  return parts * kKeysPerBlock * padded_dim;
}

// Heads, those of keys, and clusters of blocks that have to do with a window's blocks of keys.
struct WindowShape {
  int first_head, heads;
  int head_blocks, head_clusters;  // of keys, of a head
  int first_cluster, dk_clusters;  // of those
  int query_clusters;              // of a head
};

FRX_HOST_DEVICE WindowShape shape_of_window(const AttentionSizes& s, int first_block, int end_block,
                                            int cluster) {
  WindowShape shape;
  shape.head_blocks = ceil_div(s.num_keys, kKeysPerBlock);
  shape.head_clusters = ceil_div(shape.head_blocks, cluster);
  const auto cluster_of = [&](int block, int head) {
    return head * shape.head_clusters + (block - head * shape.head_blocks) / cluster;
  };
  const int last_block = end_block - 1, last_head = last_block / shape.head_blocks;
  shape.first_head = first_block / shape.head_blocks;
  shape.heads = last_head - shape.first_head + 1;
  shape.first_cluster = cluster_of(first_block, shape.first_head);
  shape.dk_clusters = cluster_of(last_block, last_head) - shape.first_cluster + 1;
  shape.query_clusters = ceil_div(s.num_queries, cluster * kWindowQueries);
  return shape;
}

// Two blocks share what they load, unless too many would have no neighbour.
inline int cluster_of_window(const AttentionSizes& s) {
  const auto pays = [](int blocks) { return blocks % 2 == 0 || blocks > 8; };
  return pays(ceil_div(s.num_keys, kKeysPerBlock)) && pays(ceil_div(s.num_queries, kWindowQueries))
             ? 2
             : 1;
}

// Tiles of a head's keys that are in a window.
FRX_HOST_DEVICE IndexRange window_tiles(int64_t first_block, int64_t end_block, int64_t head,
                                        int num_keys, int key_count) {
  constexpr int kBlockTiles = kKeysPerBlock / kWindowTile;
  const int head_blocks = ceil_div(num_keys, kKeysPerBlock);
  const int64_t first = first_block - head * head_blocks, end = end_block - head * head_blocks;
  const int begin = first > 0 ? static_cast<int>(first) : 0;
  const int last = end < head_blocks ? static_cast<int>(end) : head_blocks;
  return {begin * kBlockTiles, smaller(last * kBlockTiles, ceil_div(key_count, kWindowTile))};
}

// Tiles of a head's keys that are of a split's block.
FRX_HOST_DEVICE IndexRange split_of_tiles(IndexRange tiles, int split, int splits,
                                          int first_split) {
  if (first_split == 0) return part_of_range(tiles, split, splits);
  const int middle = smaller(tiles.begin + first_split, tiles.end);
  if (split == 0) return {tiles.begin, middle};
  return part_of_range({middle, tiles.end}, split - 1, splits - 1);
}

// What the second kernel has to do for a window. Times are in tiles of a block.
struct WindowWork {
  static constexpr double kBlockOverhead = 8.0;
  int64_t dk_blocks, late;  // of multiprocessors that have one of the former more than others
  int64_t dq_blocks;        // of a split
  int64_t heads;            // of keys, in the problem
  int64_t head_tiles;       // of a head's keys, on average
  double dk_time;           // of a block
};

inline WindowWork work_of_window(const AttentionSizes& s, int64_t first_block, int64_t end_block,
                                 int num_sms) {
  const WindowShape shape =
      shape_of_window(s, static_cast<int>(first_block), static_cast<int>(end_block), 1);
  const int group = s.num_heads / s.num_kv_heads;
  const int64_t dk_blocks = end_block - first_block;
  return {dk_blocks,
          dk_blocks % num_sms,
          int64_t{shape.heads} * group * shape.query_clusters,
          s.batch * s.num_kv_heads,
          ceil_div(dk_blocks * (kKeysPerBlock / kWindowTile), int64_t{shape.heads}),
          WindowWork::kBlockOverhead + group * ceil_div(s.num_queries, kWindowTile)};
}

// How long it takes with equal splits. Blocks for dk take the first round; those for dq fill what
// they leave, and then end together.
inline double equal_splits_time(const WindowWork& work, int splits, int num_sms) {
  const double dq_time = WindowWork::kBlockOverhead + ceil_div(work.head_tiles, int64_t{splits});
  // Multiprocessors that have a block for dk less than others, and those others
  double time = static_cast<double>(work.dk_blocks / num_sms) * work.dk_time;
  double late_time = time + work.dk_time;
  int64_t left = work.dq_blocks * splits;
  while (left > 0) {
    if (time <= late_time) {
      left -= num_sms - work.late;
      time += dq_time;
    } else {
      left -= work.late;
      late_time += dq_time;
    }
  }
  return work.late > 0 ? std::max(time, late_time) : time;
}

struct SplitPlan {
  int first_split;  // as in WindowCut
  double time;
};

// Where the blocks for dk leave room for a block of every query, these start at once, and have so
// many tiles that they end with the others, which start behind the blocks for dk. With several
// heads of keys windows have some keys of each, not as many of one as of another.
inline SplitPlan plan_splits(const WindowWork& work, int splits, int num_sms) {
  constexpr double kLeastGain = 0.05;
  const SplitPlan equal = {0, equal_splits_time(work, splits, num_sms)};
  const int64_t others = splits - 1, early = num_sms - work.late - work.dq_blocks;
  if (work.heads > 1 || work.late == 0 || others == 0 || early < 0) return equal;
  const int first = static_cast<int>((others * work.dk_time + work.head_tiles) / splits);
  if (first >= work.head_tiles) return equal;
  const double other = WindowWork::kBlockOverhead + ceil_div(work.head_tiles - first, others);
  const double time = std::max(WindowWork::kBlockOverhead + first, work.dk_time + other);
  const int64_t room = work.late + early * static_cast<int64_t>(time / other);
  if (work.dq_blocks * others > room) return equal;
  const double all_time = static_cast<double>(work.dk_blocks / num_sms) * work.dk_time + time;
  return all_time < (1 - kLeastGain) * equal.time ? SplitPlan{first, all_time} : equal;
}

// Blocks that share the keys that a query has in a window.
inline int dq_splits_of_windows(const AttentionSizes& s, int64_t blocks, int num_sms) {
  constexpr double kSplitOverhead = 4.0;  // parts are added up
  constexpr int kMaxSplits = 16;
  const int64_t all = key_blocks(s), full = (all - 1) / blocks;  // windows before the last one
  int best = 1;
  double best_time = 0;
  const WindowWork work = work_of_window(s, 0, blocks, num_sms);
  const WindowWork last_work = work_of_window(s, full * blocks, all, num_sms);
  for (int splits = 1; splits <= kMaxSplits; ++splits) {
    const double time = static_cast<double>(full) * plan_splits(work, splits, num_sms).time +
                        plan_splits(last_work, splits, num_sms).time + splits * kSplitOverhead;
    if (splits == 1 || time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

// The plan's splits of dq, of so many.
inline void split_windows(WindowPlan& plan, const AttentionSizes& s, int splits, int num_sms) {
  const int64_t all = key_blocks(s), full = (all - 1) / plan.blocks;
  const auto first_split = [&](int64_t first_block, int64_t end_block) {
    const WindowWork work = work_of_window(s, first_block, end_block, num_sms);
    return plan_splits(work, splits, num_sms).first_split;
  };
  plan.cut.first_split = first_split(0, plan.blocks);
  plan.last_cut.first_split = first_split(full * plan.blocks, all);
}

}  // namespace frx
