// Grouped projections for Hopper (sm_90a): what one launch computes, which problems it takes, and
// how they are cut in tiles. Nothing here needs CUDA or a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host_device.h"
#include "mask.cuh"
#include "params.h"

struct CUstream_st;  // what cudaStream_t points to

namespace frx {

constexpr int kMaxProjections = 3;   // q, k and v
constexpr int kMaxPositionAxes = 3;  // rows of angles that shared memory holds
constexpr int kDepthBytes = 128;     // of the common dimension, a stage
constexpr int kChunkColumns = 8;     // what a thread stores at once, 16 bytes
constexpr int kUnitColumns = 16;     // what is rotated together: two chunks
constexpr int kSharingHeads = 4;     // whose columns of the same angles make up a tile

// out = rotate(x @ weight^T + bias), a row a token. Everything contiguous and in one dtype.
struct GroupedProjection {
  const void* x;       // [rows, depth]
  const void* weight;  // [columns, depth]
  const void* bias;    // [columns] or null
  void* out;           // [rows, columns]
  int32_t rows;        // B * T
  int32_t tokens;      // T
  int32_t columns;     // H * D
  int32_t depth;
  int32_t head_dim;    // D
  bool is_transposed;  // written transposed as well: see TransposedHeads
  RotationParams rotation;
};

// Where one member's heads are written as TF32's attention reads values: [B, H, D, T padded to 8],
// as HeadsTranspose has them (transpose_heads_sm90.h).
struct TransposedHeads {
  float* out;
  // Which tokens exist; the others become zeros here, whatever they hold. Null: all.
  const int32_t* lengths;  // [B]
  const bool* keep;        // [B, T]
};

struct ProjectionGroup90 {
  DType dtype;
  int32_t count;
  GroupedProjection members[kMaxProjections];
  TransposedHeads transposed;  // of the member that is_transposed
};

// Of the common dimension, a stage.
inline int depth_block(DType dtype) { return kDepthBytes / (dtype == DType::kTF32 ? 4 : 2); }

// Why the kernel cannot take a projection; null when it can.
inline const char* projection_sm90_obstacle(DType dtype, const GroupedProjection& p) {
  const RotationParams& r = p.rotation;
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16 && dtype != DType::kTF32) {
    return "the Hopper projection multiplies bf16, fp16 and TF32 only";
  }
  if (p.columns % 8 != 0 || p.depth % 8 != 0 || p.depth == 0) {
    return "the Hopper projection needs widths that are multiples of 8";
  }
  if (p.head_dim % 8 != 0 || p.head_dim == 0 || p.columns % p.head_dim != 0) {
    return "the Hopper projection needs a head dim that is a multiple of 8";
  }
  if (r.rotary_dim > 0 && p.head_dim > 256) {
    return "the Hopper projection rotates heads of at most 256 dims";
  }
  for (const void* pointer : {p.x, p.weight, p.bias, static_cast<const void*>(p.out)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
      return "the Hopper projection needs tensors that start at multiples of 16 bytes";
    }
  }
  if (p.is_transposed && (dtype != DType::kTF32 || r.rotary_dim > 0)) {
    return "the Hopper projection transposes unrotated heads only, in TF32";
  }
  if (p.is_transposed && p.tokens > INT32_MAX - 8) {
    return "the Hopper projection cannot transpose so many tokens";
  }
  if (r.rotary_dim == 0) return nullptr;
  if (r.rotary_dim > p.head_dim || r.rotary_dim % (2 * r.axes) != 0) {
    return "the rotated dims must be whole pairs on every axis, within the head";
  }
  if (!r.interleaved && r.rotary_dim / r.axes / 2 % kChunkColumns != 0) {
    return "the Hopper projection pairs halves whose width is a multiple of 8 only";
  }
  if (r.cos == nullptr && r.axes > kMaxPositionAxes) {
    return "the Hopper projection takes at most 3 position axes";
  }
  const bool has_fractions =
      r.position_type == PositionType::kFloat32 || r.position_type == PositionType::kFloat64;
  if (r.cos == nullptr && has_fractions && r.log2_base < 0) {
    return "the Hopper projection takes fractional positions with a base of at least 1 only";
  }
  return nullptr;
}

// ---- columns ----------------------------------------------------------------------------------

// A tile's columns are units of two chunks. A thread of the tensor cores' result holds two
// neighbouring columns of each chunk, hence both members of every pair: neighbours lie within a
// chunk, and halves, if the second chunk of a unit is brought from half an axis further on.
struct ColumnUnit {
  int first,
      second;  // columns where the chunks start; that of a chunk that does not exist: columns
  int head;
  int pair;  // of the first column, within the head; negative where nothing rotates
};

// Whether weights must be gathered chunk by chunk. Else columns stay in their order.
FRX_HOST_DEVICE bool is_gathered(const RotationParams& r) {
  return r.rotary_dim > 0 && !r.interleaved;
}

FRX_HOST_DEVICE int units_a_head(const GroupedProjection& p) {
  const int rotary_dim = p.rotation.rotary_dim;
  return rotary_dim / kUnitColumns + ceil_div(p.head_dim - rotary_dim, kUnitColumns);
}

FRX_HOST_DEVICE int num_units(const GroupedProjection& p) {
  return is_gathered(p.rotation) ? p.columns / p.head_dim * units_a_head(p)
                                 : ceil_div(p.columns, kUnitColumns);
}

// Of the units of a tile, how many lie side by side in half an axis, if one copy can gather them
// all: heads that rotate throughout, halves that tiles divide or are divided by. Else 0.
FRX_HOST_DEVICE int units_a_half(const GroupedProjection& p, int tile_units) {
  const RotationParams& r = p.rotation;
  if (!is_gathered(r) || r.rotary_dim != p.head_dim) return 0;
  const int units = r.rotary_dim / r.axes / kUnitColumns;
  if (units % tile_units == 0) return tile_units;
  return tile_units % units == 0 ? units : 0;
}

// Whether tiles have a fourth of their columns from each of four heads, the same dims of all: an
// angle found once turns four pairs. Else tiles are columns side by side.
FRX_HOST_DEVICE bool shares_angles(const GroupedProjection& p, int tile_columns) {
  const RotationParams& r = p.rotation;
  const int columns = tile_columns / kSharingHeads;  // of a head
  if (r.rotary_dim == 0 || (r.cos != nullptr && r.table_head_stride != 0)) return false;
  if (p.columns / p.head_dim % kSharingHeads != 0) return false;
  if (columns % kUnitColumns != 0 || p.head_dim % columns != 0) return false;
  return !is_gathered(r) || units_a_half(p, columns / kUnitColumns) > 0;
}

// Which chunk of the columns in order a tile has where it would have `chunk` without sharing.
FRX_HOST_DEVICE int shared_chunk(const GroupedProjection& p, int tile_chunks, int chunk) {
  const int part = tile_chunks / kSharingHeads, a_head = p.head_dim / kChunkColumns;
  const int tile = chunk / tile_chunks, within = chunk - tile * tile_chunks;
  const int parts_a_head = a_head / part, head_group = tile / parts_a_head;
  const int head = head_group * kSharingHeads + within / part;
  return head * a_head + (tile - head_group * parts_a_head) * part + within % part;
}

// Of a gathered projection. Units past the end are all missing chunks.
FRX_HOST_DEVICE ColumnUnit gathered_unit(const GroupedProjection& p, int unit) {
  const RotationParams& r = p.rotation;
  const int a_head = units_a_head(p), head = unit / a_head, within = unit - head * a_head;
  const int start = head * p.head_dim;
  if (start >= p.columns) return {p.columns, p.columns, head, -1};
  const int turning = r.rotary_dim / kUnitColumns;
  if (within < turning) {
    const int half_width = r.rotary_dim / r.axes / 2, an_axis = half_width / kChunkColumns;
    const int axis = within / an_axis, j = (within - axis * an_axis) * kChunkColumns;
    const int first = start + 2 * axis * half_width + j;
    return {first, first + half_width, head, axis * half_width + j};
  }
  const int first = start + r.rotary_dim + (within - turning) * kUnitColumns;
  const int second = first + kChunkColumns;
  return {first, second < start + p.head_dim ? second : p.columns, head, -1};
}

// The column at which a chunk starts; at least p.columns if it does not exist.
FRX_HOST_DEVICE int chunk_column(const GroupedProjection& p, int chunk) {
  if (!is_gathered(p.rotation)) return chunk * kChunkColumns;
  const ColumnUnit unit = gathered_unit(p, chunk / 2);
  return chunk % 2 == 0 ? unit.first : unit.second;
}

// A chunk as the epilogue needs it.
struct alignas(16) ChunkPlace {
  int column;  // as chunk_column()
  int head;
  int pair;       // of its first column: neighbours; of the unit's first columns: halves
  int num_pairs;  // that rotate from there on: of four in the chunk, or of eight in the unit
};

FRX_HOST_DEVICE ChunkPlace chunk_place(const GroupedProjection& p, int chunk) {
  if (is_gathered(p.rotation)) {
    const ColumnUnit unit = gathered_unit(p, chunk / 2);
    return {chunk % 2 == 0 ? unit.first : unit.second, unit.head, unit.pair,
            unit.pair < 0 ? 0 : kChunkColumns};
  }
  const int column = chunk * kChunkColumns, head = column / p.head_dim;
  const int pair = (column - head * p.head_dim) / 2;
  return {column, head, pair, column < p.columns ? p.rotation.rotary_dim / 2 - pair : 0};
}

// ---- tiles ------------------------------------------------------------------------------------

struct ProjectionTile {
  int rows;
  int columns;
  int stages;       // of the ring that feeds the tensor cores
  bool takes_tf32;  // not measured with 192 rows
};

// Two tiles are under way in a block, one a consumer. 192 rows bounded by registers (192
// accumulators a thread), 5 stages by shared memory.
constexpr ProjectionTile kProjectionTiles[] = {{192, 128, 5, false},
                                               {128, 128, 6, true},
                                               {64, 128, 8, true},
                                               {64, 64, 8, true},
                                               {64, 32, 8, true}};
constexpr int kNumProjectionTiles = sizeof(kProjectionTiles) / sizeof(kProjectionTiles[0]);

struct ProjectionSchedule {
  int32_t first_tile;  // of this member, in the launch
  int32_t row_tiles;
  int32_t column_tiles;
  int32_t depth_blocks;
  int32_t shares;  // 1: as shares_angles()
  int32_t band;    // row tiles that are worked on side by side
};

struct ProjectionPlan {
  int32_t tile;  // index into kProjectionTiles
  int32_t num_tiles;
  ProjectionSchedule schedule[kMaxProjections];
};

struct TilePlace {
  int member, row, column;  // row and column count tiles
};

// Bands of row tiles, whose columns all blocks share while they are in L2; down a column of the
// band first.
FRX_HOST_DEVICE TilePlace locate_tile(const ProjectionSchedule (&schedule)[kMaxProjections],
                                      int count, int index) {
  int member = 0;
  while (member + 1 < count && index >= schedule[member + 1].first_tile) ++member;
  const ProjectionSchedule& s = schedule[member];
  const int rest = index - s.first_tile, a_band = s.band * s.column_tiles;
  const int band = rest / a_band, within = rest - band * a_band;
  const int first_row = band * s.band, height = smaller(s.band, s.row_tiles - first_row);
  const int column = within / height;
  return {member, first_row + within - column * height, column};
}

// Tiles of that size in which the group falls.
inline int64_t count_tiles(const ProjectionGroup90& group, const ProjectionTile& tile) {
  int64_t tiles = 0;
  for (int i = 0; i < group.count; ++i) {
    const GroupedProjection& p = group.members[i];
    tiles += static_cast<int64_t>(ceil_div(p.rows, tile.rows)) *
             ceil_div(num_units(p), tile.columns / kUnitColumns);
  }
  return tiles;
}

// Clock cycles that the busiest multiprocessor takes, roughly; the members are in launch order.
inline double projection_cycles(const ProjectionGroup90& group, const ProjectionTile& tile,
                                int num_sms) {
  // Of one multiprocessor's tensor cores. In TF32 half as many, with half as many numbers a byte.
  constexpr double kFlopsACycle = 4096;
  // The others were fitted to the times that groups take with each tile, bf16 and TF32.
  constexpr double kStageCycles = 250;      // of a stage, whatever its size
  constexpr double kBytesACycle = 107;      // that reach its shared memory beyond those
  constexpr double kTurnCycles = 72;        // an accumulator of a thread, in the epilogue
  constexpr double kSharedTurnCycles = 42;  // the same, if four heads share the angle
  constexpr double kStoreCycles = 14;       // the same, without rotation
  constexpr double kDisturbance = 0.6;      // what an epilogue takes from the products beside it
  constexpr double kTileCycles = 1400;      // of an epilogue, whatever its size
  const double block =
      std::max(1.0 * tile.rows * tile.columns * kDepthBytes / kFlopsACycle,
               kStageCycles + 1.0 * (tile.rows + tile.columns) * kDepthBytes / kBytesACycle);
  double cycles = 0, epilogue = 0;
  int64_t first = 0;
  for (int i = 0; i < group.count; ++i) {
    const GroupedProjection& p = group.members[i];
    const int64_t end = first + static_cast<int64_t>(ceil_div(p.rows, tile.rows)) *
                                    ceil_div(num_units(p), tile.columns / kUnitColumns);
    const int64_t share =  // of the block that has the launch's first tile
        ceil_div(end, static_cast<int64_t>(num_sms)) -
        ceil_div(first, static_cast<int64_t>(num_sms));
    const double products = ceil_div(p.depth, depth_block(group.dtype)) * block;
    const double turn = shares_angles(p, tile.columns) ? kSharedTurnCycles : kTurnCycles;
    epilogue = kTileCycles +
               tile.rows * tile.columns / 128 * (p.rotation.rotary_dim > 0 ? turn : kStoreCycles);
    // One tile's epilogue runs beside the next one's products.
    cycles += share * std::max(products + kDisturbance * epilogue, (products + epilogue) / 2);
    first = end;
  }
  return cycles + epilogue;
}

inline bool can_take(const ProjectionTile& tile, const ProjectionGroup90& group) {
  if (!tile.takes_tf32 && group.dtype == DType::kTF32) return false;
  return count_tiles(group, tile) <= INT32_MAX / 2;
}

// The tile that takes least time; -1 if the group has more tiles than an index counts.
inline int choose_projection_tile(const ProjectionGroup90& group, int num_sms) {
  int best = -1;
  double best_cycles = 0;
  for (int i = 0; i < kNumProjectionTiles; ++i) {
    if (!can_take(kProjectionTiles[i], group)) continue;
    const double cycles = projection_cycles(group, kProjectionTiles[i], num_sms);
    if (best < 0 || cycles < best_cycles) {
      best = i;
      best_cycles = cycles;
    }
  }
  return best;
}

// Where each member's tiles are in the launch, for a tile that the group can take.
inline ProjectionPlan plan_projections(const ProjectionGroup90& group, int num_sms, int tile) {
  constexpr int kLeastBand = 8;
  const ProjectionTile& size = kProjectionTiles[tile];
  ProjectionPlan plan{};
  plan.tile = tile;
  for (int i = 0; i < group.count; ++i) {
    const GroupedProjection& p = group.members[i];
    ProjectionSchedule& s = plan.schedule[i];
    s.first_tile = plan.num_tiles;
    s.row_tiles = ceil_div(p.rows, size.rows);
    s.column_tiles = ceil_div(num_units(p), size.columns / kUnitColumns);
    s.depth_blocks = ceil_div(p.depth, depth_block(group.dtype));
    s.shares = shares_angles(p, size.columns);
    s.band = std::min(s.row_tiles, std::max(kLeastBand, ceil_div(num_sms, s.column_tiles)));
    plan.num_tiles += s.row_tiles * s.column_tiles;
  }
  return plan;
}

// The longest products first, so that what is left over at the end is short; without the members
// that have no results.
inline void put_in_launch_order(ProjectionGroup90& group) {
  GroupedProjection* const begin = group.members;
  GroupedProjection* const end =
      std::remove_if(begin, begin + group.count,
                     [](const GroupedProjection& p) { return p.rows == 0 || p.columns == 0; });
  group.count = static_cast<int32_t>(end - begin);
  std::stable_sort(begin, end, [](const GroupedProjection& a, const GroupedProjection& b) {
    return a.depth > b.depth;
  });
}

// ---- launch -----------------------------------------------------------------------------------

// tile: index into kProjectionTiles, or negative to choose.
void run_projections_sm90(ProjectionGroup90 group, int tile, CUstream_st* stream);

// One translation unit a family of tiles.
void projections_sm90_m192(const ProjectionGroup90& group, const ProjectionPlan& plan,
                           CUstream_st* stream);
void projections_sm90_m128(const ProjectionGroup90& group, const ProjectionPlan& plan,
                           CUstream_st* stream);
void projections_sm90_tf32(const ProjectionGroup90& group, const ProjectionPlan& plan,
                           CUstream_st* stream);
void projections_sm90_m64(const ProjectionGroup90& group, const ProjectionPlan& plan,
                          CUstream_st* stream);

}  // namespace frx
