// Windows of score gradients. With 256 dims a thread's registers hold one of dq, dk and dv: three
// kernels would each make the scores anew, eight products where five are needed. Instead the kernel
// for dv writes the score gradients of some blocks of keys, a window, and a second kernel makes dk
// and dq of them; then the next window takes its place. Nothing here needs CUDA or a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "key_pieces.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

constexpr int64_t kMostWindowBytes = int64_t{160} << 20;  // whatever the problem
constexpr int kWindowTile = 64;      // rows of the side that the second kernel walks over
constexpr int kWindowQueries = 128;  // of a block for dq

struct WindowPlan {
  int32_t blocks;  // of keys, in a window; 0: no windows
  KeyCut cut;
};

inline int64_t window_block_bytes(const AttentionSizes& s) {
  const int64_t padded_queries = ceil_div(s.num_queries, 64) * int64_t{64};
  return s.num_heads / s.num_kv_heads * padded_queries * kKeysPerBlock * 2;
}

// Whether three products saved of a tile of 64 queries and a block of keys outweigh what a window
// takes beside its products: two launches or three, and filling their pipelines.
inline bool windows_pay(const AttentionSizes& s, int64_t blocks, int num_sms) {
  constexpr double kSavedTime = 1.9;        // of a multiprocessor, in microseconds on an H200
  constexpr double kWindowOverhead = 20.0;  // likewise
  const int64_t all = key_blocks(s), windows = ceil_div(all, blocks);
  const double tiles =
      static_cast<double>(all) * s.num_heads / s.num_kv_heads * ceil_div(s.num_queries, 64);
  return kSavedTime * tiles / num_sms > kWindowOverhead * windows;
}

// Windows of whole waves of blocks if these find room, of blocks cut along their queries if not,
// and at least two of them: a problem's score gradients are never there all at once.
inline WindowPlan plan_windows(const AttentionSizes& s, int padded_dim, int num_sms) {
  const WindowPlan none = {0, {0, 1}};
  if (s.num_queries == 0) return none;
  const int64_t all = key_blocks(s), most = kMostWindowBytes / window_block_bytes(s);
  WindowPlan plan;
  if (most >= num_sms) {
    const int64_t waves = std::max<int64_t>(1, std::min(most, all / 2) / num_sms);
    plan.blocks = static_cast<int32_t>(waves * num_sms);
    plan.cut = cut_last_wave(s, false, padded_dim, num_sms, 1);
  } else {
    if (most == 0) return none;
    plan.cut = {0, static_cast<int32_t>(ceil_div(int64_t{num_sms}, most))};
    plan.blocks = num_sms / plan.cut.pieces;
  }
  if (plan.blocks == 0 || all <= plan.blocks) return none;
  return windows_pay(s, plan.blocks, num_sms) ? plan : none;
}

// Parts of dv, which are added up window by window.
inline int64_t window_part_floats(const AttentionSizes& s, const WindowPlan& plan, int padded_dim) {
  if (plan.cut.pieces == 1) return 0;
  const int64_t cut_blocks = std::min<int64_t>(plan.blocks, key_blocks(s) - plan.cut.first_block);
  return cut_blocks * plan.cut.pieces * kKeysPerBlock * padded_dim;
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

// How long the second kernel takes for a window, in tiles of a block. Blocks for dk take the first
// round; those for dq fill what they leave, and then end together.
inline double window_time(const AttentionSizes& s, int64_t first_block, int64_t end_block,
                          int dq_splits, int num_sms) {
  constexpr double kBlockOverhead = 8.0;
  const WindowShape shape =
      shape_of_window(s, static_cast<int>(first_block), static_cast<int>(end_block), 1);
  const int group = s.num_heads / s.num_kv_heads;
  const int64_t dk_blocks = end_block - first_block, late = dk_blocks % num_sms;
  const int64_t head_tiles =  // of keys, on average
      ceil_div(dk_blocks * (kKeysPerBlock / kWindowTile), int64_t{shape.heads});
  const double dk_time = kBlockOverhead + group * ceil_div(s.num_queries, kWindowTile);
  const double dq_time = kBlockOverhead + ceil_div(head_tiles, int64_t{dq_splits});
  // Multiprocessors that have a block for dk less than others, and those others
  double time = static_cast<double>(dk_blocks / num_sms) * dk_time, late_time = time + dk_time;
  int64_t left = int64_t{shape.heads} * group * shape.query_clusters * dq_splits;
  while (left > 0) {
    if (time <= late_time) {
      left -= num_sms - late;
      time += dq_time;
    } else {
      left -= late;
      late_time += dq_time;
    }
  }
  return late > 0 ? std::max(time, late_time) : time;
}

// Blocks that share the keys that a query has in a window.
inline int dq_splits_of_windows(const AttentionSizes& s, int64_t blocks, int num_sms) {
  constexpr double kSplitOverhead = 4.0;  // parts are added up
  constexpr int kMaxSplits = 16;
  const int64_t all = key_blocks(s), full = (all - 1) / blocks;  // windows before the last one
  int best = 1;
  double best_time = 0;
  for (int splits = 1; splits <= kMaxSplits; ++splits) {
    const double time = static_cast<double>(full) * window_time(s, 0, blocks, splits, num_sms) +
                        window_time(s, full * blocks, all, splits, num_sms) +
                        splits * kSplitOverhead;
    if (splits == 1 || time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

}  // namespace frx
