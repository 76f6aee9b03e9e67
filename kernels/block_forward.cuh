// The block of a small problem in three short kernels: projections of q, k and v, attention, output
// projection. Each starts while the one before still runs, and has its parameters, its indices and,
// for the output, its weights at hand by the time that one's results are complete.
//
// One tile a block; q, k, v, o and lse go through global memory, which L2 holds, and are what a
// backward needs anyway.
#pragma once

#include <algorithm>

#include "block_attention.cuh"
#include "block_forward.h"
#include "chained_launch.cuh"
#include "device.h"
#include "plan.h"
#include "projection_tile.cuh"

namespace frx {

// Blocks that share a multiprocessor.
template <class Op, int kColumns, int kRows>
constexpr int kProjectionBlocks = ProjectionShape<Op, kColumns, kRows>::kResidents;
template <class Op, int kD>
constexpr int kAttentionBlocks = Op::kSplits || kD == 128 ? 1 : 2;

template <class Op, int kColumns, int kRows>
__global__ __launch_bounds__(
    kBlockThreads,
    kProjectionBlocks<Op, kColumns, kRows>) void block_projection_kernel(const __grid_constant__
                                                                             ProjectionGroup
                                                                                 group) {
  using Shape = ProjectionShape<Op, kColumns, kRows>;
  extern __shared__ __align__(16) char smem[];
  int tile = blockIdx.x, member = 0;
  while (tile >= group.tiles[member]) tile -= group.tiles[member++];
  const ProjectionParams& p = group.members[member];
  const int row_tile = quotient(tile, p.column_tiles);
  const int column_tile = tile - row_tile * p.column_tiles.value;
  project_tile<Op, Shape>(p, group.follows_kernel, row_tile * kRows, column_tile * kColumns, smem);
}

template <class Op, int kD>
__global__ __launch_bounds__(kBlockThreads, kAttentionBlocks<Op, kD>) void block_attention_kernel(
    const __grid_constant__ BlockAttentionParams p) {
  using Shape = BlockAttentionShape<Op, kD>;
  extern __shared__ __align__(16) char smem[];
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  attend_tile<Shape>(p, shared);
}

// What a kernel takes of the shared memory that it may need: little leaves room for blocks of the
// next kernel, which fetch their first operands early. Either this or all, since what has to be
// asked for is a setting of the kernel's that other threads may be about to launch with.
constexpr size_t smem_of(size_t needed, size_t most) {
  constexpr size_t kUnasked = 48 * 1024;  // a kernel gets without asking for more
  return needed <= kUnasked ? needed : most;
}

// For the stages that a group's tiles have.
template <class Shape>
size_t projection_smem(const ProjectionGroup& p) {
  int depth = 0;
  for (int i = 0; i < p.count; ++i) depth = std::max(depth, p.members[i].depth);
  const size_t stages = ceil_div(depth, Shape::kDepth) * Shape::kStageBytes;
  return smem_of(std::max<size_t>(stages, Shape::kSumBytes), Shape::kSmemBytes);
}

// For the chunks of keys that a warp has.
template <class Shape>
size_t attention_smem(int num_keys, int splits) {
  using Storage = typename Shape::SharedStorage;
  const int chunks = ceil_div(ceil_div(num_keys, Shape::kKeys), Shape::kKeyWarps * splits);
  const size_t stages = size_t{Shape::kKeyWarps} * sizeof(typename Shape::Chunk) * chunks;
  const size_t needed = Shape::kQueryBytes + std::max(stages, sizeof(typename Shape::Results));
  return smem_of(needed, sizeof(Storage));
}

template <class Op, int kColumns, int kRows>
void launch_projections(const ProjectionGroup& group, cudaStream_t stream) {
  int64_t blocks = 0;
  for (int i = 0; i < group.count; ++i) blocks += group.tiles[i];
  launch_chained(block_projection_kernel<Op, kColumns, kRows>, "block_projection", blocks,
                 kBlockThreads, projection_smem<ProjectionShape<Op, kColumns, kRows>>(group),
                 stream, group);
}

template <class Op, int kD>
void launch_projections(const ProjectionGroup& group, cudaStream_t stream) {
  if (group.tile_columns == kBlockNarrowColumns) {
    return launch_projections<Op, kBlockNarrowColumns, kBlockLowTile>(group, stream);
  }
  switch (group.tile_rows) {
    case kBlockLowTile:
      return launch_projections<Op, kD, kBlockLowTile>(group, stream);
    case kBlockMiddleTile:
      return launch_projections<Op, kD, kBlockMiddleTile>(group, stream);
    default:
      return launch_projections<Op, kD, block_high_tile(kD)>(group, stream);
  }
}

template <class Op, int kD>
void launch_attention(const BlockAttentionParams& params, cudaStream_t stream) {
  constexpr auto kKernel = block_attention_kernel<Op, kD>;
  constexpr const char* kName = "block_attention";
  BlockAttentionParams p = params;
  const AttentionSizes& sizes = p.attention.sizes;
  const int64_t tiles = sizes.batch * sizes.num_heads * p.query_tiles.value;
  const int64_t slots = int64_t{current_gpu().num_sms} * kAttentionBlocks<Op, kD>;
  const int log2_splits = choose_log2_key_splits(tiles, sizes.num_keys, slots);
  p.log2_key_splits =
      log2_splits > 0 && waits_for_previous_kernel(kKernel, kName) ? log2_splits : 0;
  const int splits = 1 << p.log2_key_splits;
  launch_chained(kKernel, kName, tiles * splits, kBlockThreads,
                 attention_smem<BlockAttentionShape<Op, kD>>(sizes.num_keys, splits), stream, p,
                 splits);
}

// ProjectionOp: multiplies what comes from memory, which leaves more ways to split fp32.
template <class Op, class ProjectionOp, int kD>
void launch_block_forward(const BlockForwardParams& p, cudaStream_t stream) {
  launch_projections<ProjectionOp, kD>(p.inputs, stream);
  launch_attention<Op, kD>(p.attention, stream);
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
