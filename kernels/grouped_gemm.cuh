// A group of independent products in one launch, for problems so small that each alone would leave
// most of the GPU idle.
//
// A block computes a tile of 32 x 64: two warps along the columns, and four that share the depth
// and meet in shared memory in fp32. The right operand's rows are always the depth; the left's are
// the result's rows (dx = dz w) or the depth as well (dw = dz^T x).
#pragma once

#include "block_backward_params.h"
#include "chained_launch.cuh"
#include "launch.h"
#include "mma.cuh"
#include "storage.cuh"
#include "tile.cuh"

namespace frx {

// A tile whose rows are the depth of a product. 16-bit elements go through ldmatrix, which the
// swizzle of SmemTile serves. fp32 elements are read one by one, four rows and eight columns a
// warp: their chunks of 16 bytes must lie apart by row in pairs.
template <class Element, int kColumns>
struct DepthTile : SmemTile<Element, kColumns> {
  using Base = SmemTile<Element, kColumns>;
  __device__ __forceinline__ int swizzled(int row, int chunk) const {
    if constexpr (sizeof(Element) == 2) return Base::swizzled(row, chunk);
    static_assert(sizeof(Element) == 2 || Base::kChunks >= 8, "a row is 128 bytes at least");
    return row * Base::kChunks + (chunk ^ 2 * (row & 3));
  }
  __device__ __forceinline__ Element* chunk(int row, int chunk) const {
    return this->data + swizzled(row, chunk) * Base::kChunkElements;
  }
  __device__ __forceinline__ uint32_t address(int row, int chunk_index) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(chunk(row, chunk_index)));
  }
  __device__ __forceinline__ uint32_t element_address(int row, int column) const {
    return address(row, column / Base::kChunkElements) +
           column % Base::kChunkElements * sizeof(Element);
  }
  __device__ __forceinline__ float value(int row, int column) const {
    return to_float(chunk(row, column / Base::kChunkElements)[column % Base::kChunkElements]);
  }
};

// Starts the copy of kRows rows of a matrix into a tile. Rows for which row_exists(row) is false
// and columns at and beyond num_columns become zeros.
template <int kRows, int kThreads, class Tile, class Element, class RowExists>
__device__ __forceinline__ void load_rows(Tile tile, const Element* source, int64_t row_stride,
                                          int num_columns, RowExists row_exists, int thread) {
  constexpr int kChunks = Tile::kChunks, kChunkElements = Tile::kChunkElements;
#pragma unroll
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool exists = chunk * kChunkElements < num_columns && row_exists(row);
    copy_async_16(tile.address(row, chunk),
                  exists ? source + row * row_stride + chunk * kChunkElements : source, exists);
  }
}

// Fragments out of tiles whose rows are the depth, in the depth order of Op::load_a.
template <class Op, class Tile>
__device__ __forceinline__ void load_right(typename Op::B (&b)[2], Tile tile, int k_step,
                                           int column, int lane) {
  if constexpr (sizeof(typename Op::Element) == 2) {
    Op::load_b_transposed(b, tile, k_step, column, lane);
  } else {
    const int row = 8 * k_step + lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[n].r[i] = load_shared_word(tile.element_address(row + 4 * i, column + 8 * n + lane / 4));
      }
    }
  }
}

template <class Op, class Tile>
__device__ __forceinline__ typename Op::A load_left_transposed(Tile tile, int row, int k_step,
                                                               int lane) {
  if constexpr (sizeof(typename Op::Element) == 2) {
    typename Op::A a;
    ldmatrix_x4_trans(a.r,
                      tile.address(16 * k_step + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
    return a;
  } else {
    const int depth = 8 * k_step + lane % 4;
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = load_shared_word(tile.element_address(depth + i / 2 * 4, row + i % 2 * 8 + lane / 4));
    }
    return Op::prepare(r);
  }
}

template <class Op>
struct GemmShape {
  using Element = typename Op::Element;
  static constexpr int kThreads = 256;
  static constexpr int kM = kGemmTileRows, kN = kGemmTileColumns;
  static constexpr int kColumnWarps = kN / 32;
  static constexpr int kDepthWarps = kThreads / 32 / kColumnWarps;
  static constexpr int kSteps = 2;  // of a warp, a stage
  static constexpr int kDepth = kDepthWarps * kSteps * Op::kK;
  static constexpr int kStages = 4;
  using LeftTile = SmemTile<Element, kDepth>;
  using LeftTransposedTile = DepthTile<Element, kM>;
  using RightTile = DepthTile<Element, kN>;

  static constexpr int kSumStride = kN + 8;  // accumulators are written without bank conflicts
  struct Stage {
    alignas(16) Element left[kM * kDepth];
    alignas(16) Element right[kDepth * kN];
  };
  struct Sums {
    float share[kDepthWarps][kM][kSumStride];
    float left[kThreads / kM][kM];
  };
  union SharedStorage {
    Stage stages[kStages];
    Sums sums;
  };
  static_assert(sizeof(SharedStorage) <= 96 * 1024, "every GPU since sm_80 has it");
};

// The stages of a task: those of its first term, then those of its second.
template <int kDepth>
struct GemmSlice {
  const GemmTerm& term;
  int start;  // in the depth

  static __device__ __forceinline__ int count(const GemmTask& p, int term) {
    return term < p.num_terms ? ceil_div(p.terms[term].depth, kDepth) : 0;
  }
  static __device__ __forceinline__ GemmSlice at(const GemmTask& p, int stage) {
    const int first_stages = count(p, 0);
    if (stage < first_stages) return {p.terms[0], stage * kDepth};
    return {p.terms[1], (stage - first_stages) * kDepth};
  }
};

// Whether a token's row of the right operand may be read.
__device__ __forceinline__ bool token_exists(const GemmTask& p, int row) {
  if (p.kv_lengths == nullptr && p.key_keep == nullptr) return true;
  const int batch = row / p.tokens, token = row - batch * p.tokens;
  return token < key_count(p.kv_lengths, batch, p.tokens) &&
         (p.key_keep == nullptr || p.key_keep[row]);
}

template <class Op, bool kTransposed>
__device__ __forceinline__ void load_gemm_stage(const GemmTask& p, int stage,
                                                typename GemmShape<Op>::Stage& shared,
                                                int first_row, int first_column, int thread) {
  using Shape = GemmShape<Op>;
  using Element = typename Op::Element;
  const auto slice = GemmSlice<Shape::kDepth>::at(p, stage);
  const int depth = slice.term.depth, start = slice.start;
  const Element* left = static_cast<const Element*>(slice.term.left);
  const Element* right = static_cast<const Element*>(slice.term.right);
  auto depth_exists = [&](int row) { return start + row < depth; };
  if constexpr (kTransposed) {
    load_rows<Shape::kDepth, Shape::kThreads>(
        typename Shape::LeftTransposedTile{{shared.left}},
        left + static_cast<int64_t>(start) * p.rows + first_row, p.rows, p.rows - first_row,
        depth_exists, thread);
  } else {
    load_rows<Shape::kM, Shape::kThreads>(
        typename Shape::LeftTile{shared.left},
        left + static_cast<int64_t>(first_row) * depth + start, depth, depth - start,
        [&](int row) { return first_row + row < p.rows; }, thread);
  }
  if (p.columns == 0) return;  // only sums of the left operand are wanted
  load_rows<Shape::kDepth, Shape::kThreads>(
      typename Shape::RightTile{{shared.right}},
      right + static_cast<int64_t>(start) * p.columns + first_column, p.columns,
      p.columns - first_column,
      [&](int row) { return depth_exists(row) && token_exists(p, start + row); }, thread);
}

// c += this warp's share of a stage.
template <class Op, bool kTransposed>
__device__ __forceinline__ void multiply_gemm_stage(float (&c)[2][4][4],
                                                    typename GemmShape<Op>::Stage& shared,
                                                    int warp_column, int first_step, int lane) {
  using Shape = GemmShape<Op>;
  const typename Shape::RightTile right{{shared.right}};
#pragma unroll(Op::kSplits ? 1 : Shape::kSteps)
  for (int k = first_step; k < first_step + Shape::kSteps; ++k) {
    typename Op::A a[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if constexpr (kTransposed) {
        const typename Shape::LeftTransposedTile left{{shared.left}};
        a[m] = load_left_transposed<Op>(left, 16 * m, k, lane);
      } else {
        a[m] = Op::load_a(typename Shape::LeftTile{shared.left}, 16 * m, k, lane);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      typename Op::B b[2];
      load_right<Op>(b, right, k, warp_column + 8 * n, lane);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Op::multiply_add(c[m][n], a[m], b[0]);
        Op::multiply_add(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// Adds up the shares of the depth in a fixed order, rounds once and stores.
template <class Op>
__device__ __forceinline__ void finish_gemm_tile(const GemmTask& p,
                                                 const typename GemmShape<Op>::Sums& sums,
                                                 int first_row, int first_column, bool sum_left,
                                                 int thread) {
  using Shape = GemmShape<Op>;
  using Element = typename Op::Element;
  const int local_column = thread % (Shape::kN / 2) * 2, column = first_column + local_column;
  constexpr int kRowStep = Shape::kThreads / (Shape::kN / 2);
#pragma unroll
  for (int row = thread / (Shape::kN / 2); row < Shape::kM; row += kRowStep) {
    if (column >= p.columns || first_row + row >= p.rows) break;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int share = 0; share < Shape::kDepthWarps; ++share) {
      x += sums.share[share][row][local_column];
      y += sums.share[share][row][local_column + 1];
    }
    store2(
        static_cast<Element*>(p.out) + static_cast<int64_t>(first_row + row) * p.columns + column,
        x, y);
  }
  if (sum_left && thread < Shape::kM && first_row + thread < p.rows) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < Shape::kThreads / Shape::kM; ++part) sum += sums.left[part][thread];
    static_cast<Element*>(p.left_sums)[first_row + thread] = from_float<Element>(sum);
  }
}

template <class Op, bool kTransposed>
__device__ __forceinline__ void multiply_gemm_tile(const GemmTask& p, int first_row,
                                                   int first_column,
                                                   typename GemmShape<Op>::SharedStorage& shared) {
  using Shape = GemmShape<Op>;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_column = warp % Shape::kColumnWarps * 32, share = warp / Shape::kColumnWarps;
  const int num_stages =
      GemmSlice<Shape::kDepth>::count(p, 0) + GemmSlice<Shape::kDepth>::count(p, 1);
  auto load = [&](int i) {
    if (i < num_stages) {
      load_gemm_stage<Op, kTransposed>(p, i, shared.stages[i % Shape::kStages], first_row,
                                       first_column, opaque(thread));
    }
    commit_copies();  // also an empty group, so that counting them is counting stages
  };
  for (int i = 0; i < Shape::kStages - 1; ++i) load(i);

  // One column of tiles also sums the left operand: a thread every kRowParts-th row of a column.
  constexpr int kRowParts = Shape::kThreads / Shape::kM;
  const bool sum_left = kTransposed && p.left_sums != nullptr && first_column == 0;
  float c[2][4][4] = {}, left_sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    wait_copies<Shape::kStages - 2>();
    __syncthreads();  // stage i is here, and every warp is done with stage i - 1
    load(i + Shape::kStages - 1);
    auto& stage = shared.stages[i % Shape::kStages];
    multiply_gemm_stage<Op, kTransposed>(c, stage, warp_column, share * Shape::kSteps, lane);
    if (sum_left) {
      const typename Shape::LeftTransposedTile left{{stage.left}};
      float sum = 0.f;  // of this stage: shorter chains round less
#pragma unroll
      for (int row = 0; row < Shape::kDepth; row += kRowParts) {
        sum += left.value(row + thread / Shape::kM, thread % Shape::kM);
      }
      left_sum += sum;
    }
  }

  // Every share of the depth to shared memory, in place of the stages
  wait_copies<0>();
  __syncthreads();  // every warp is done with the last stage
  auto& sums = shared.sums;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int row = 16 * m + lane / 4, column = warp_column + 8 * n + 2 * (lane % 4);
      store2(&sums.share[share][row][column], c[m][n][0], c[m][n][1]);
      store2(&sums.share[share][row + 8][column], c[m][n][2], c[m][n][3]);
    }
  }
  if (sum_left) sums.left[thread / Shape::kM][thread % Shape::kM] = left_sum;
  __syncthreads();  // all shares are written
  finish_gemm_tile<Op>(p, sums, first_row, first_column, sum_left, thread);
}

template <class Op>
__global__ __launch_bounds__(GemmShape<Op>::kThreads,
                             2) void grouped_gemm_kernel(const __grid_constant__ GemmGroup group) {
  extern __shared__ __align__(16) char smem[];
  auto& shared = *reinterpret_cast<typename GemmShape<Op>::SharedStorage*>(smem);
  let_next_kernel_start();
  wait_for_previous_kernel();
  int tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < group.count; ++i) {
    const GemmTask& p = group.tasks[i];
    const int column_tiles = gemm_column_tiles(p), tiles = gemm_row_tiles(p) * column_tiles;
    if (tile >= tiles) {
      tile -= tiles;
      continue;
    }
    const int first_row = tile / column_tiles * kGemmTileRows;
    const int first_column = tile % column_tiles * kGemmTileColumns;
    if (p.left_transposed) {
      multiply_gemm_tile<Op, true>(p, first_row, first_column, shared);
    } else {
      multiply_gemm_tile<Op, false>(p, first_row, first_column, shared);
    }
    return;
  }
}

}  // namespace frx
