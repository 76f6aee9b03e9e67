// Plain data of the one-launch block: its projections, its attention, and how they are cut in
// tiles.
#pragma once

#include <cstdint>

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
  int32_t tokens;      // T
  int32_t columns;     // multiple of 8
  int32_t depth;       // multiple of 8
  int32_t head_dim;    // what rotates together; says nothing where rotary_dim is 0
  RotationParams rotation;
};

// Projections that do not depend on each other, and the rows of their tiles.
struct ProjectionGroup {
  ProjectionParams members[3];
  int32_t count;
  int32_t tile_rows;  // kBlockLowTile or block_high_tile()
};

struct BlockForwardParams {
  ProjectionGroup inputs;  // q, k, v; q alone where keys and values are projected already
  AttentionForwardParams attention;
  ProjectionGroup output;  // empty where the merged heads are the result
  int32_t num_blocks;
};

// Rows of a projection tile. Its columns are the padded head dim, so that rotated pairs stay
// together. The high tile is bounded by registers: accumulators, and the angles of a thread's
// pairs.
constexpr int kBlockLowTile = 32;
FRX_HOST_DEVICE constexpr int block_high_tile(int tile_columns) {
  return tile_columns == 32 ? 96 : 64;
}
constexpr int kBlockLargestHeadDim = 128;
constexpr int kBlockTileQueries = 16;

inline int64_t projection_tiles(const ProjectionGroup& group, int tile_rows, int tile_columns) {
  int64_t tiles = 0;
  for (int i = 0; i < group.count; ++i) {
    const ProjectionParams& p = group.members[i];
    tiles += static_cast<int64_t>(ceil_div(p.rows, tile_rows)) * ceil_div(p.columns, tile_columns);
  }
  return tiles;
}

// The tile height whose waves over all multiprocessors take least time, a tile costing its rows
// and, for filling the pipeline and the epilogue, a fixed share on top.
inline int choose_tile_rows(const ProjectionGroup& group, int tile_columns, int num_sms) {
  constexpr int kFixedRows = 16;
  auto cost = [&](int rows) {
    const int64_t tiles = projection_tiles(group, rows, tile_columns);
    return ceil_div(tiles, static_cast<int64_t>(num_sms)) * (rows + kFixedRows);
  };
  const int high = block_high_tile(tile_columns);
  return cost(high) < cost(kBlockLowTile) ? high : kBlockLowTile;
}

}  // namespace frx
