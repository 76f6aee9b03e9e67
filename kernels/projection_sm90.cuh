// Grouped projections on Hopper: out = rotate(x @ weight^T + bias) for up to three independent
// members in one persistent launch. A warp drives the copy engine: a ring of stages, 64 of the
// depth each, for one tile after another. Three warps, the scribes, write down what each tile's
// epilogue must know. The two consumer warpgroups take the tiles in turn: while
// one rotates and stores, the tensor cores work for the other. Accumulators stay in registers,
// where a thread has both members of each pair. docs/design/projection.md has the shared-memory map
// and the barrier table.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "chained_launch.cuh"
#include "device.h"
#include "launch.h"
#include "matrix_sm90.cuh"
#include "projection_sm90_parts.cuh"
#include "wgmma_sm90.cuh"

namespace frx {

// ---- producer ---------------------------------------------------------------------------------

// One warp. Weights come at once, or a head at a time where heads share angles; gathered ones too
// where a copy can gather, else chunk by chunk.
template <class Config, class Element>
__device__ __forceinline__ void produce(const ProjectionKernelParams& params,
                                        ProjectionStorage<Config>& smem, int lane) {
  constexpr int kDepthBlock = kDepthBytes / sizeof(Stored<Element>);
  wait_for_previous_kernel();
  RingPlace<Config::kStages> ring(0);
  for (int index = blockIdx.x; index < params.num_tiles; index += gridDim.x) {
    const TilePlace place = locate_tile(params.schedule, params.count, index);
    const GroupedProjection& p = params.members[place.member];
    const CUtensorMap& x_map = params.x_maps[place.member];
    const CUtensorMap& weight_map = params.weight_maps[place.member];
    const int first_row = place.row * Config::kRows;
    const bool shares = params.schedule[place.member].shares;
    const int parts = shares ? kSharingHeads : 1, part_chunks = Config::kChunks / parts;
    const bool is_halves = units_a_half(p, part_chunks / 2) > 0;
    // A lane a copy: of one head's part, or of a chunk where no copy can gather more
    const int copies = is_gathered(p.rotation) && !is_halves ? Config::kChunks : parts;
    const int copy_chunks = Config::kChunks / copies;
    int chunk = place.column * Config::kChunks + lane * copy_chunks;
    if (shares) chunk = shared_chunk(p, Config::kChunks, chunk);
    const int column = chunk_column(p, chunk);
    const int half_units = p.rotation.rotary_dim / p.rotation.axes / kUnitColumns;
    const int axis = is_halves ? chunk / 2 / half_units : 0;
    const int unit_in_half = chunk / 2 - axis * half_units;
    const int blocks = params.schedule[place.member].depth_blocks;
    for (int block = 0; block < blocks; ++block) {
      mbarrier_wait(smem.empty[ring.stage], ring.parity ^ 1);
      __syncwarp();  // else a lane might look when the stage is full and empty again
      if (lane == 0) {
        mbarrier_arrive_expect_tx(smem.full[ring.stage], Config::kXBytes + Config::kWeightBytes);
        cp_async_bulk_tensor_4d(&smem.x[ring.stage], x_map, smem.full[ring.stage],
                                block * kDepthBlock, first_row, 0, 0);
      }
      auto& weight = smem.weight[ring.stage][lane * copy_chunks * kChunkColumns];
      if (lane < copies && is_halves) {
        cp_async_bulk_tensor_5d(&weight, weight_map, smem.full[ring.stage], block * kDepthBlock, 0,
                                0, unit_in_half, axis);
      } else if (lane < copies) {
        cp_async_bulk_tensor_4d(&weight, weight_map, smem.full[ring.stage], block * kDepthBlock,
                                column, 0, 0);
      }
      ring.advance();
    }
  }
}

// All scribes: the facts of one tile after another, as soon as the consumer has used what their
// place holds.
template <class Config, class Element>
__device__ __forceinline__ void write_facts(const ProjectionKernelParams& params,
                                            ProjectionStorage<Config>& smem, int thread) {
  prepare_turns<Config>(params, smem, thread);
  named_barrier_sync(kTurnsReady, kScribeThreads);
  wait_for_previous_kernel();
  uint32_t tile = 0;
  for (int index = blockIdx.x; index < params.num_tiles; index += gridDim.x, ++tile) {
    const uint32_t consumer = tile % kProjectionConsumers;
    const RingPlace<Config::kFactSets> set(tile / kProjectionConsumers);
    const TilePlace place = locate_tile(params.schedule, params.count, index);
    mbarrier_wait(smem.facts_empty[consumer][set.stage], set.parity ^ 1);
    prepare_tile<Config, Element>(smem.facts[consumer][set.stage], params.members[place.member],
                                  params.transposed, smem.turns[place.member],
                                  place.row * Config::kRows, place.column * Config::kChunks,
                                  params.schedule[place.member].shares, thread / 32, thread % 32);
    mbarrier_arrive(smem.facts_full[consumer][set.stage]);
  }
}

// ---- consumer ---------------------------------------------------------------------------------

// A tile's product into the registers of one warpgroup.
template <class Config, class Element>
__device__ __forceinline__ void multiply_tile(
    float (&accumulators)[Config::kRowBlocks][Config::kAccumulators],
    ProjectionStorage<Config>& smem, uint32_t position, int blocks, uint32_t consumer, int lane) {
  const SmemDescriptor x_smem = swizzled_descriptor<Config::kRowBytes>(smem_address(smem.x), 0);
  const SmemDescriptor weight_smem =
      swizzled_descriptor<Config::kRowBytes>(smem_address(smem.weight), 0);
  RingPlace<Config::kStages> ring(position);
  // A parity tells a phase from the next, not from the one after: without this a consumer would
  // take stages of the other's tile, a lap earlier, for its own.
  constexpr int kConsumerThreads = kProjectionConsumers * kWarpgroup;
  named_barrier_sync(kMayMultiply + consumer, kConsumerThreads);
#pragma unroll
  for (int m = 0; m < Config::kRowBlocks; ++m) pin_registers(accumulators[m]);
  uint32_t last_stage = 0;
  for (int block = 0; block < blocks; ++block) {
    mbarrier_wait(smem.full[ring.stage], ring.parity);
    const SmemDescriptor x = x_smem + ring.stage * Config::kXBytes;
    const SmemDescriptor weight = weight_smem + ring.stage * Config::kWeightBytes;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepthBytes / 32; ++step) {
#pragma unroll
      for (int m = 0; m < Config::kRowBlocks; ++m) {
        Wgmma<Element, Config::kColumns>::ss(accumulators[m],
                                             x + (m * 64 * Config::kRowBytes + step * 32),
                                             weight + step * 32, block + step > 0);
      }
    }
    wgmma_commit_group();
    // The products before these are done: their stage is free.
    wgmma_wait_group<1>();
    if (block > 0 && lane == 0) mbarrier_arrive(smem.empty[last_stage]);
    last_stage = ring.stage;
    ring.advance();
  }
  named_barrier_arrive(kMayMultiply + (consumer ^ 1), kConsumerThreads);
  wgmma_wait_group<0>();
#pragma unroll
  for (int m = 0; m < Config::kRowBlocks; ++m) pin_registers(accumulators[m]);
  if (lane == 0) mbarrier_arrive(smem.empty[last_stage]);
}

template <class Config, class Element>
__device__ __forceinline__ void consume(const ProjectionKernelParams& params,
                                        ProjectionStorage<Config>& smem, uint32_t consumer,
                                        int thread) {
  // Before anything is stored, and before the next kernel relies on what precedes this one. Its
  // blocks find room where one of these, which take all registers, is done.
  wait_for_previous_kernel();
  let_next_kernel_start();
  // The first tile is consumer 0's.
  if (consumer == 1) named_barrier_arrive(kMayMultiply, kProjectionConsumers * kWarpgroup);

  RingPlace<Config::kFactSets> set(0);
  // Twice the next tile's position in the ring, plus whose tile it is: one register.
  uint32_t state = 0;
  for (int index = blockIdx.x; index < params.num_tiles; index += gridDim.x) {
    const TilePlace place = locate_tile(params.schedule, params.count, index);
    const int blocks = params.schedule[place.member].depth_blocks;
    if ((state & 1) == consumer) {
      const GroupedProjection& p = params.members[place.member];
      float accumulators[Config::kRowBlocks][Config::kAccumulators];
      multiply_tile<Config, Element>(accumulators, smem, state / 2, blocks, consumer, thread % 32);
      mbarrier_wait(smem.facts_full[consumer][set.stage], set.parity);
      finish_tile<Config, Element>(accumulators, p, smem.facts[consumer][set.stage],
                                   params.transposed.out, params.schedule[place.member].shares,
                                   place.row * Config::kRows, thread);
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(smem.facts_empty[consumer][set.stage]);
      set.advance();
    }
    state = (state + 2 * blocks) ^ 1;
  }
}

template <class Config, class Element>
__global__ void __launch_bounds__(Config::kThreads, 1)
    projection_sm90_kernel(const __grid_constant__ ProjectionKernelParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<ProjectionStorage<Config>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);

  // Barriers: a full one completes by the copies' bytes, an empty one by the consumer's four warps.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(smem.full[stage], 1);
      mbarrier_init(smem.empty[stage], kWarpgroup / 32);
    }
    for (int consumer = 0; consumer < kProjectionConsumers; ++consumer) {
      for (int set = 0; set < Config::kFactSets; ++set) {
        mbarrier_init(smem.facts_full[consumer][set], kScribeThreads);
        mbarrier_init(smem.facts_empty[consumer][set], kWarpgroup / 32);
      }
    }
    fence_mbarrier_init();
    for (int i = 0; i < params.count; ++i) {
      prefetch_tensormap(params.x_maps[i]);
      prefetch_tensormap(params.weight_maps[i]);
    }
  }
  __syncthreads();

  if (warpgroup == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      produce<Config, Element>(params, smem, threadIdx.x);
    } else {
      write_facts<Config, Element>(params, smem, threadIdx.x - 32);
    }
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config, Element>(params, smem, warpgroup - 1, threadIdx.x % kWarpgroup);
  }
#else
  __trap();
#endif
}

// ---- launcher ---------------------------------------------------------------------------------

template <class Config>
CUtensorMap weight_map(const GroupedProjection& p, DType dtype, bool shares) {
  const int parts = shares ? kSharingHeads : 1, part_units = Config::kUnits / parts;
  if (const int units = units_a_half(p, part_units); units > 0) {
    const int half = p.rotation.rotary_dim / p.rotation.axes / 2;
    return make_halves_map(p.weight, dtype, p.columns, p.depth, half, units, part_units / units);
  }
  return matrix_map(p.weight, dtype, p.columns, p.depth, p.depth,
                    is_gathered(p.rotation) ? kChunkColumns : Config::kColumns / parts);
}

template <int kTile, class Element>
void launch_projections_sm90(const ProjectionGroup90& group, const ProjectionPlan& plan,
                             CUstream_st* stream) {
  using Config = ProjectionConfig<kTile>;
  static_assert(sizeof(ProjectionStorage<Config>) <= 227 * 1024);
  ProjectionKernelParams params{};
  params.count = group.count;
  params.num_tiles = plan.num_tiles;
  params.transposed = group.transposed;
  for (int i = 0; i < group.count; ++i) {
    const GroupedProjection& p = group.members[i];
    params.members[i] = p;
    params.schedule[i] = plan.schedule[i];
    params.x_maps[i] = matrix_map(p.x, group.dtype, p.rows, p.depth, p.depth, Config::kRows);
    params.weight_maps[i] = weight_map<Config>(p, group.dtype, plan.schedule[i].shares);
  }
  launch_chained(projection_sm90_kernel<Config, Element>, "projection_sm90",
                 std::min(plan.num_tiles, current_gpu().num_sms), Config::kThreads,
                 sizeof(ProjectionStorage<Config>), stream, params);
}

template <int kTile>
void dispatch_projections_sm90(const ProjectionGroup90& group, const ProjectionPlan& plan,
                               CUstream_st* stream) {
  if (group.dtype == DType::kBFloat16) {
    launch_projections_sm90<kTile, __nv_bfloat16>(group, plan, stream);
  } else {
    launch_projections_sm90<kTile, __half>(group, plan, stream);
  }
}

}  // namespace frx
