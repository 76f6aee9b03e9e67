// The block of a small problem in three short kernels: projections of q, k and v, attention, output
// projection. Each starts while the one before still runs, and has its parameters, its indices and,
// for the output, its weights at hand by the time that one's results are complete.
//
// One tile a block; q, k, v, o and lse go through global memory, which L2 holds, and are what a
// backward needs anyway.
#pragma once

#include "block_attention.cuh"
#include "block_forward.h"
#include "chained_launch.cuh"
#include "plan.h"
#include "projection_tile.cuh"

namespace frx {

// Blocks that share a multiprocessor.
template <class Op, int kD, int kRows>
constexpr int kProjectionBlocks = ProjectionShape<Op, kD, kRows>::kResidents;
template <class Op, int kD>
constexpr int kAttentionBlocks = Op::kSplits || kD == 128 ? 1 : 2;

// kD: the padded head dim, and the columns of a tile.
template <class Op, int kD, int kRows>
__global__
__launch_bounds__(kBlockThreads, kProjectionBlocks<Op, kD, kRows>) void block_projection_kernel(
    const __grid_constant__ ProjectionGroup group) {
  using Shape = ProjectionShape<Op, kD, kRows>;
  extern __shared__ __align__(16) char smem[];
  int tile = blockIdx.x, member = 0;
  while (tile >= group.tiles[member]) tile -= group.tiles[member++];
  // What comes before the block is complete, also for the kernels after this one, before any of
  // them reads an argument.
  if (!group.follows_kernel) wait_for_previous_kernel();
  let_next_kernel_start();
  const ProjectionParams& p = group.members[member];
  const int row_tile = quotient(tile, p.column_tiles);
  const int column_tile = tile - row_tile * p.column_tiles.value;
  project_tile<Op, Shape>(p, group.follows_kernel, row_tile * kRows, column_tile * kD, smem);
}

template <class Op, int kD>
__global__ __launch_bounds__(kBlockThreads, kAttentionBlocks<Op, kD>) void block_attention_kernel(
    const __grid_constant__ BlockAttentionParams p) {
  extern __shared__ __align__(16) char smem[];
  let_next_kernel_start();
  attend_tile<Op, kD>(p, blockIdx.x, smem);
}

template <class Op, int kD, int kRows>
void launch_projections(const ProjectionGroup& group, cudaStream_t stream) {
  int64_t blocks = 0;
  for (int i = 0; i < group.count; ++i) blocks += group.tiles[i];
  launch_chained(block_projection_kernel<Op, kD, kRows>, "block_projection", blocks, kBlockThreads,
                 ProjectionShape<Op, kD, kRows>::kSmemBytes, stream, group);
}

template <class Op, int kD>
void launch_projections(const ProjectionGroup& group, cudaStream_t stream) {
  switch (group.tile_rows) {
    case kBlockLowTile:
      return launch_projections<Op, kD, kBlockLowTile>(group, stream);
    case kBlockMiddleTile:
      return launch_projections<Op, kD, kBlockMiddleTile>(group, stream);
    default:
      return launch_projections<Op, kD, block_high_tile(kD)>(group, stream);
  }
}

// ProjectionOp: multiplies what comes from memory, which leaves more ways to split fp32.
template <class Op, class ProjectionOp, int kD>
void launch_block_forward(const BlockForwardParams& p, cudaStream_t stream) {
  launch_projections<ProjectionOp, kD>(p.inputs, stream);
  const AttentionSizes& sizes = p.attention.attention.sizes;
  launch_chained(block_attention_kernel<Op, kD>, "block_attention",
                 sizes.batch * sizes.num_heads * p.attention.query_tiles.value, kBlockThreads,
                 sizeof(typename BlockAttentionShape<Op, kD>::SharedStorage), stream, p.attention);
  if (p.output.count > 0) launch_projections<ProjectionOp, kD>(p.output, stream);
}

template <class Op, class ProjectionOp = Op>
void dispatch_block_forward(const BlockForwardParams& p, cudaStream_t stream) {
  switch (padded_head_dim(p.attention.attention.sizes.head_dim)) {
    case 32:
      return launch_block_forward<Op, ProjectionOp, 32>(p, stream);
    case 64:
      return launch_block_forward<Op, ProjectionOp, 64>(p, stream);
    default:
      return launch_block_forward<Op, ProjectionOp, 128>(p, stream);
  }
}

}  // namespace frx
