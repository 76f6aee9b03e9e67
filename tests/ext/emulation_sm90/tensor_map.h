// make_heads_map and make_halves_map.
#pragma once

#include <cuda.h>

#include "params.h"

namespace frx {

inline CUtensorMap make_heads_map(const HeadsView& view, DType dtype, int64_t, int num_tokens, int,
                                  int head_dim, int box_dims, int box_tokens) {
  CUtensorMap map = {static_cast<const char*>(view.data), num_tokens, head_dim, box_tokens,
                     box_dims};
  if (dtype == DType::kTF32) map.element_bytes = 4;
  map.token_stride = view.token_stride;
  map.head_stride = view.head_stride;
  map.batch_stride = view.batch_stride;
  return map;
}

inline CUtensorMap make_halves_map(const void* data, DType dtype, int rows, int width, int half,
                                   int box_chunks, int box_axes) {
  const int element_bytes = dtype == DType::kTF32 ? 4 : 2;
  CUtensorMap map = {static_cast<const char*>(data),
                     rows,
                     width,
                     16 * box_chunks * box_axes,
                     128 / element_bytes,
                     half,
                     box_chunks};
  map.element_bytes = element_bytes;
  return map;
}

}  // namespace frx
