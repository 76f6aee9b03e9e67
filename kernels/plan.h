// Which kernel an attention problem takes, with which tiles: a pure function of sizes and GPU, so
// that it can be printed and tested on a machine without one.
#pragma once

#include <cstdint>

#include "params.h"

namespace frx {

struct Gpu {
  int capability;  // 10 * major + minor: 80, 90, ...
  int num_sms;
};

// Query and key rows of one block's tile in the portable forward kernel.
struct ForwardTile {
  int queries;
  int keys;
};

struct ForwardPlan {
  bool use_sm90;  // Hopper's warp-specialised kernel
  ForwardTile tile;
  int num_splits;               // blocks that share the keys of one query tile
  int64_t v_transposed_floats;  // workspace; 0: none
};

// Head dims are padded to the next of 32, 64, 128, 256 in shared memory and registers.
int padded_head_dim(int head_dim);

// Key rows a tile of the portable forward kernel, bounded by 255 registers a thread (outputs and
// scores of 16 or 32 rows a warp) and by 99 KB of shared memory (sm_86, sm_89).
constexpr int forward_tile_keys(bool is_half, int padded_dim, int tile_queries) {
  if (padded_dim == 256) return is_half ? 32 : 16;
  return tile_queries == 128 || (padded_dim == 128 && !is_half) ? 32 : 64;
}

// Where the forward did not keep what rounding took from o, the backward sums each row of weights
// and weight gradients before it uses them, up to so many keys, instead of taking rowsum(dout * o)
// for the latter: the error of o, common to a whole row, is the largest there is. Two products
// more.
constexpr int kMaxRowSumKeys = 1024;

// Reads sizes, dtype and which modifiers are present; pointers are compared with null only.
ForwardPlan plan_attention_forward(const AttentionForwardParams& params, const Gpu& gpu);

}  // namespace frx
