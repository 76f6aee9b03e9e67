// Plain data of a small block's backward: its attention, and the products around it.
#pragma once

#include <cstdint>

#include "block_rotation.h"
#include "divisor.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

// left * right over their common depth. right is [depth, columns]; left [rows, depth], or
// [depth, rows] where the task says so. Everything contiguous and in the block's dtype.
struct GemmTerm {
  const void* left;   // may be made by the kernel before
  const void* right;  // an argument of the block: there before any of its kernels starts
};

// out = sum of the terms' products, rounded once.
struct GemmTask {
  GemmTerm terms[2];
  int32_t num_terms;
  int32_t depth;  // of each term
  bool left_transposed;
  int32_t rows;     // multiple of 8 where left is transposed
  int32_t columns;  // multiple of 8; 0: only left_sums is wanted
  void* out;        // [rows, columns]
  void* left_sums;  // [rows]: a transposed left summed over the depth; or null

  // The depth counts tokens [B, tokens]; those that lengths or mask remove may be NaN in right.
  Divisor tokens;
  const int32_t* kv_lengths;  // [B] or null
  const bool* key_keep;       // [B, tokens] or null

  Divisor column_tiles;
};

constexpr int kMaxGemmTasks = 4;

// Products that do not depend on each other, the longest first.
struct GemmGroup {
  GemmTask tasks[kMaxGemmTasks];
  int32_t tiles[kMaxGemmTasks];
  int32_t count;
};

constexpr int kGemmTileRows = 32;
constexpr int kGemmTileColumns = 32;

// Works out everything that follows from the sizes; the number of tiles.
inline int64_t plan_gemms(GemmGroup& group) {
  int64_t all = 0;
  for (int i = 0; i < group.count; ++i) {
    GemmTask& task = group.tasks[i];
    const int columns = larger(1, ceil_div(task.columns, kGemmTileColumns));
    const int64_t tiles = static_cast<int64_t>(ceil_div(task.rows, kGemmTileRows)) * columns;
    task.column_tiles = make_divisor(columns);
    // Where this does not fit, neither does the grid, which the launch refuses.
    group.tiles[i] = tiles < INT32_MAX ? static_cast<int32_t>(tiles) : INT32_MAX;
    all += tiles;
  }
  return all;
}

// What the key side must know of a query, beside its row of q and dout.
struct alignas(16) RowTerms {
  float lse;           // in units of the scores; +inf where the row has no key
  float weight_scale;  // makes recomputed weights sum to 1
  float delta;         // sum over the keys of weight * dweight, in 16 bits less dlse
  float dlse;          // in 16 bits 0
};

// Attention with the rotations undone: dq and dk are gradients of what the projections put out.
struct BlockAttentionBackwardParams {
  // dout is written where w_out makes it, read otherwise. No dropout, no dbias; delta and
  // weight_scale are not used.
  AttentionBackwardParams attention;
  RowTerms* row_terms;  // [B, H, Tq] workspace: written by the query side, read by the key side
  BlockRotation q_rotation, k_rotation;
  const void* dy;     // [B*Tq, out_width] contiguous; read with w_out only
  const void* w_out;  // [out_width, H*D] contiguous; null: dout is there already
  int32_t out_width;  // multiple of 8

  Divisor query_tiles, key_tiles, heads, kv_heads, heads_a_kv_head;
};

// One launch of the query side.
struct BlockQueryParams {
  BlockAttentionBackwardParams attention;
  // A kernel of the same call precedes it. The first one waits for what comes before the call
  // before it lets others start, which may therefore read every argument at once.
  bool follows_kernel;
};

// One launch of products.
struct BlockProductParams {
  GemmGroup group;
  bool follows_kernel;
};

// One launch of the key side, with the products that do not need it.
struct BlockKeyParams {
  BlockAttentionBackwardParams attention;
  GemmGroup products;
  int32_t key_blocks;
  bool follows_kernel;
};

struct BlockBackwardParams {
  GemmGroup dout;  // empty where the query side makes dout, or dy is dout
  BlockAttentionBackwardParams attention;
  GemmGroup early;  // products that need the query side at most
  GemmGroup late;   // products that need the key side
};

// Rows of one side that a block of the attention kernels keeps, and of a chunk of the other side.
constexpr int kBlockBackwardRows = 16;

constexpr int kBlockBackwardLargestHeadDim = 128;

}  // namespace frx
