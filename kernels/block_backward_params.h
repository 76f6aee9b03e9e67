// Plain data of a small block's backward: its attention, and the products around it.
#pragma once

#include <cstdint>

#include "block_rotation.h"
#include "mask.cuh"
#include "params.h"

namespace frx {

// left * right over their common depth. right is [depth, columns]; left [rows, depth], or
// [depth, rows] where the task says so. Everything contiguous and in the block's dtype.
struct GemmTerm {
  const void* left;
  const void* right;
  int32_t depth;
};

// out = sum of the terms' products, rounded once.
struct GemmTask {
  GemmTerm terms[2];
  int32_t num_terms;
  bool left_transposed;
  int32_t rows;     // multiple of 8 where left is transposed
  int32_t columns;  // multiple of 8; 0: only left_sums is wanted
  void* out;        // [rows, columns]
  void* left_sums;  // [rows]: a transposed left summed over the depth; or null

  // The depth counts tokens [B, tokens]; those that lengths or mask remove may be NaN in right.
  int32_t tokens;
  const int32_t* kv_lengths;  // [B] or null
  const bool* key_keep;       // [B, tokens] or null
};

constexpr int kMaxGemmTasks = 7;

// Products that do not depend on each other, the longest first.
struct GemmGroup {
  GemmTask tasks[kMaxGemmTasks];
  int32_t count;
};

constexpr int kGemmTileRows = 32;
constexpr int kGemmTileColumns = 64;

FRX_HOST_DEVICE int gemm_row_tiles(const GemmTask& task) {
  return ceil_div(task.rows, kGemmTileRows);
}
FRX_HOST_DEVICE int gemm_column_tiles(const GemmTask& task) {
  return larger(1, ceil_div(task.columns, kGemmTileColumns));
}

inline int64_t gemm_tiles(const GemmGroup& group) {
  int64_t tiles = 0;
  for (int i = 0; i < group.count; ++i) {
    tiles +=
        static_cast<int64_t>(gemm_row_tiles(group.tasks[i])) * gemm_column_tiles(group.tasks[i]);
  }
  return tiles;
}

// Attention with the rotations undone: dq and dk are gradients of what the projections put out.
struct BlockAttentionBackwardParams {
  // dout is written where w_out makes it, read otherwise. delta and weight_scale are written by the
  // query side and read by the key side. No dropout, no dbias.
  AttentionBackwardParams attention;
  BlockRotation q_rotation, k_rotation;
  const void* dy;     // [B*Tq, out_width] contiguous; read with w_out only
  const void* w_out;  // [out_width, H*D] contiguous; null: dout is there already
  int32_t out_width;  // multiple of 8
};

struct BlockBackwardParams {
  GemmGroup dout;  // empty where the query side makes dout, or dy is dout
  BlockAttentionBackwardParams attention;
  GemmGroup gradients;
};

// Rows of one side that a block of the attention kernels keeps, and of a chunk of the other side.
constexpr int kBlockBackwardRows = 16;

constexpr int kBlockBackwardLargestHeadDim = 128;

}  // namespace frx
