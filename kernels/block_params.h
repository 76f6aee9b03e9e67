// Plain data of a small block's forward: its projections, its attention, and how they are cut in
// tiles.
#pragma once

#include <cstdint>

#include "block_rotation.h"
#include "divisor.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

// out = rotate(x @ weight^T + bias), a row a token. Everything contiguous and in the block's dtype.
struct ProjectionParams {
  const void* x;       // [rows, depth]
  const void* weight;  // [columns, depth]
  const void* bias;    // [columns] or null
  void* out;           // [rows, columns]
  int32_t rows;        // B * T
  int32_t columns;     // multiple of 8
  int32_t depth;       // multiple of 8
  int32_t head_shift;  // log2 of the head dim; says nothing where rotary_dim is 0
  Divisor tokens;      // T
  Divisor column_tiles;
  BlockRotation rotation;
};

// Projections that do not depend on each other, one tile a block.
struct ProjectionGroup {
  ProjectionParams members[3];
  int32_t tiles[3];
  int32_t count;
  int32_t tile_rows;
  int32_t tile_columns;
  // x comes from the kernel before, weights do not: they are fetched while that one still runs.
  bool follows_kernel;
};

struct BlockAttentionParams {
  AttentionForwardParams attention;
  int32_t log2_key_splits;  // 2^this blocks share the keys of a tile
  bool has_finished_keys;   // k and v are arguments: they are fetched while q is made
  Divisor query_tiles;
  Divisor heads;
  Divisor heads_a_kv_head;
};

struct BlockForwardParams {
  ProjectionGroup inputs;  // q, k, v; q alone where keys and values are projected already
  BlockAttentionParams attention;
  ProjectionGroup output;  // empty where the merged heads are the result
};

// Rows of a projection tile. Its columns are the padded head dim, so that rotated pairs stay
// together. The highest tile is bounded by registers: accumulators, and the angles of a thread's
// pairs. The narrowest has eight pairs of columns that are rotated together, wherever they lie.
constexpr int kBlockLowTile = 16;
constexpr int kBlockMiddleTile = 32;
constexpr int kBlockNarrowColumns = 16;
FRX_HOST_DEVICE constexpr int block_high_tile(int tile_columns) {
  return tile_columns == 32 ? 96 : 64;
}
constexpr int kBlockTileQueries = 16;
constexpr int kLargestLog2Splits = 3;  // clusters of 8 blocks are what every Hopper GPU has

inline int64_t projection_tiles(const ProjectionParams& p, int tile_rows, int tile_columns) {
  return static_cast<int64_t>(ceil_div(p.rows, tile_rows)) * ceil_div(p.columns, tile_columns);
}

inline int64_t count_tiles(const ProjectionGroup& group, int tile_rows, int tile_columns) {
  int64_t tiles = 0;
  for (int i = 0; i < group.count; ++i) {
    tiles += projection_tiles(group.members[i], tile_rows, tile_columns);
  }
  return tiles;
}

// Blocks of projection tiles that share a multiprocessor, bounded by registers.
FRX_HOST_DEVICE constexpr int block_residents(int tile_columns, int tile_rows, bool is_fp32) {
  const bool is_high = tile_rows == block_high_tile(tile_columns);
  const int residents = tile_columns == 128 || is_high ? 2 : 3;
  return is_fp32 || (tile_columns == 128 && is_high) ? residents - 1 : residents;
}

// The tile height that takes least time: tiles side by side on a multiprocessor share its
// arithmetic but hide each other's latency, which is as long as kLatencyRows rows take.
inline int choose_tile_rows(const ProjectionGroup& group, int tile_columns, int num_sms,
                            bool is_fp32) {
  constexpr int kLatencyRows = 48;
  int best = 0;
  int64_t least = INT64_MAX;
  for (int rows : {kBlockLowTile, kBlockMiddleTile, block_high_tile(tile_columns)}) {
    const int64_t tiles = count_tiles(group, rows, tile_columns);
    const int64_t sms = num_sms, slots = sms * block_residents(tile_columns, rows, is_fp32);
    const int64_t cost = ceil_div(tiles, sms) * rows + ceil_div(tiles, slots) * kLatencyRows;
    if (cost < least) {
      least = cost;
      best = rows;
    }
  }
  return best;
}

// Few tiles leave multiprocessors idle: as many blocks share the keys of each as there is room for,
// while every warp still has two chunks.
inline int choose_log2_key_splits(int64_t tiles, int num_keys, int64_t slots) {
  constexpr int kLeastKeys = 256;
  int log2_splits = 0;
  while (log2_splits < kLargestLog2Splits && tiles << (log2_splits + 1) <= slots &&
         num_keys >> (log2_splits + 1) >= kLeastKeys) {
    ++log2_splits;
  }
  return log2_splits;
}

// Fills in everything that follows from the sizes. head_columns: the padded head dim.
inline void plan_projections(ProjectionGroup& group, int head_columns, int num_sms, bool is_fp32) {
  group.tile_rows = choose_tile_rows(group, head_columns, num_sms, is_fp32);
  const bool is_narrow = 2 * count_tiles(group, kBlockLowTile, head_columns) <= num_sms;
  if (is_narrow) group.tile_rows = kBlockLowTile;
  group.tile_columns = is_narrow ? kBlockNarrowColumns : head_columns;
  for (int i = 0; i < group.count; ++i) {
    ProjectionParams& p = group.members[i];
    group.tiles[i] = static_cast<int32_t>(projection_tiles(p, group.tile_rows, group.tile_columns));
    p.column_tiles = make_divisor(ceil_div(p.columns, group.tile_columns));
    plan_rotation(p.rotation);
  }
}

}  // namespace frx
