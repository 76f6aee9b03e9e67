// Descriptions of tensors for the copy engine (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "params.h"

namespace frx {

// Whether the copy engine can read the view: 16-byte aligned rows, strides in its range.
bool is_tensor_map_possible(const HeadsView& view, int64_t batch, int num_tokens, int num_heads,
                            int element_bytes = 2);

// Map of a [B, T, H, D] view with coordinates (d, t, h, b). One copy brings [box_tokens, box_dims]
// of one head, 64 or 128 bytes a row, swizzled over a row's width; whatever lies outside the tensor
// arrives as zeros. kTF32: every number arrives rounded to the nearest of TF32.
CUtensorMap make_heads_map(const HeadsView& view, DType dtype, int64_t batch, int num_tokens,
                           int num_heads, int head_dim, int box_dims, int box_tokens);

// Map of a [rows, width] matrix whose rows are paired halves of axes: of each
// axis `half` rows, then their partners. Coordinates (column, row of a chunk of 8, 0 or 1 for the
// half, chunk of the half, axis). One copy brings 128 bytes of [box_axes, box_chunks, 2, 8] rows:
// each chunk and its partners side by side, in order.
CUtensorMap make_halves_map(const void* data, DType dtype, int rows, int width, int half,
                            int box_chunks, int box_axes);

}  // namespace frx
