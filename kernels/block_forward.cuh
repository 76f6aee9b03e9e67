// The whole block in one launch, for problems too small to fill a GPU for long: projections of q, k
// and v, attention, output projection.
//
// One block a multiprocessor, all resident. The three phases are separated by barriers across the
// grid and hand over through global memory, which L2 holds; q, k, v, o and lse are what a backward
// needs anyway. In each phase a block takes every num_blocks-th tile.
#pragma once

#include <cooperative_groups.h>

#include "block_attention.cuh"
#include "block_forward.h"
#include "launch.h"
#include "projection_tile.cuh"

namespace frx {

template <class Op, int kD>
__device__ __forceinline__ void project_group(const ProjectionGroup& group, char* smem) {
  if (group.tile_rows == kBlockLowTile) {
    project_tiles<Op, kD, kBlockLowTile / 32>(group, smem);
  } else {
    project_tiles<Op, kD, block_high_tile(kD) / 32>(group, smem);
  }
}

// kD: the padded head dim, and the columns of a projection tile.
template <class Op, int kD>
__global__ __launch_bounds__(kBlockThreads, 1) void block_forward_kernel(
    const __grid_constant__ BlockForwardParams p) {
  extern __shared__ __align__(16) char smem[];
  const auto grid = cooperative_groups::this_grid();
  // One copy of the projection's code: instructions, too, have to come from memory.
#pragma unroll 1
  for (int phase = 0; phase < 2; ++phase) {
    project_group<Op, kD>(phase == 0 ? p.inputs : p.output, smem);
    if (phase == 1) return;
    grid.sync();  // q, k and v are written
    attend_tiles<Op, kD>(p.attention, smem);
    if (p.output.count == 0) return;
    grid.sync();  // o is written
  }
}

template <class Op, int kD>
void launch_block_forward(const BlockForwardParams& p, cudaStream_t stream) {
  launch_cooperative(block_forward_kernel<Op, kD>, "block_forward", p.num_blocks, kBlockThreads,
                     kBlockSmemBytes, stream, p);
}

template <class Op>
void dispatch_block_forward(const BlockForwardParams& p, cudaStream_t stream) {
  switch (padded_head_dim(p.attention.sizes.head_dim)) {
    case 32:
      return launch_block_forward<Op, 32>(p, stream);
    case 64:
      return launch_block_forward<Op, 64>(p, stream);
    default:
      return launch_block_forward<Op, 128>(p, stream);
  }
}

}  // namespace frx
