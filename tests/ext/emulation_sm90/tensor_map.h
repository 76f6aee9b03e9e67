// make_heads_map for matrices: one batch, one head.
#pragma once

#include <cuda.h>

#include "params.h"

namespace frx {

inline CUtensorMap make_heads_map(const HeadsView& view, DType, int64_t, int num_tokens, int,
                                  int head_dim, int box_dims, int box_tokens) {
  return {static_cast<const uint16_t*>(view.data), num_tokens, head_dim, box_tokens, box_dims};
}

}  // namespace frx
