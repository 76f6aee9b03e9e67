// make_heads_map and make_halves_map.
#pragma once

#include <cuda.h>

#include "params.h"

namespace frx {

inline CUtensorMap make_heads_map(const HeadsView& view, DType, int64_t, int num_tokens, int,
                                  int head_dim, int box_dims, int box_tokens) {
  CUtensorMap map = {static_cast<const uint16_t*>(view.data), num_tokens, head_dim, box_tokens,
                     box_dims};
  map.token_stride = view.token_stride;
  map.head_stride = view.head_stride;
  map.batch_stride = view.batch_stride;
  return map;
}

inline CUtensorMap make_halves_map(const void* data, DType, int rows, int width, int half,
                                   int box_chunks, int box_axes) {
  return {static_cast<const uint16_t*>(data),
          rows,
          width,
          16 * box_chunks * box_axes,
          64,
          half,
          box_chunks};
}

}  // namespace frx
