// A group of independent products, for problems so small that each alone would leave most of the
// GPU idle.
//
// A block computes a tile of 32 x 32: its warps share the depth and meet in shared memory in fp32.
// The right operand's rows are always the depth; the left's are the result's rows (dx = dz w) or
// the depth as well (dw = dz^T x). Right operands are arguments of the block, and are fetched while
// the kernel that makes the left ones still runs.
#pragma once

#include <type_traits>

#include "block_backward_params.h"
#include "chained_launch.cuh"
#include "mma.cuh"
#include "projection_tile.cuh"  // defines: StageCopier
#include "row_copier.cuh"
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
  // The fp32 element of row `row` + t, column `column` + g for lane (g, t); multiples of 4 and 8.
  // The swizzle is the lane's alone, so that its part of all addresses is found once.
  __device__ __forceinline__ uint32_t lane_address(int row, int column, int lane) const {
    static_assert(sizeof(Element) == 4 && kColumns % 32 == 0);
    const int g = lane / 4, t = lane % 4;
    return static_cast<uint32_t>(__cvta_generic_to_shared(this->data)) +
           (row + t) * static_cast<int>(kColumns * sizeof(Element)) +
           (4 * g + (32 * t ^ 4 * column % 128)) + column / 32 * 128;
  }
  __device__ __forceinline__ float value(int row, int column) const {
    return to_float(chunk(row, column / Base::kChunkElements)[column % Base::kChunkElements]);
  }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies stages of kRows rows of a [depth, columns] matrix, as wide as the tile, to shared memory.
template <class Tile, int kRows, int kThreads>
class DepthCopier {
 public:
  template <class Element>
  __device__ __forceinline__ DepthCopier(const Element* matrix, int depth, int columns,
                                         int columns_left, int thread)
      : copier_(thread),
        // Rows of the matrix below this thread's first: none where its columns do not exist.
        rows_left_(copier_.column() < columns_left ? depth - copier_.row() : 0),
        row_bytes_(columns * static_cast<int>(sizeof(Element))),
        source_(settled(reinterpret_cast<const char*>(matrix + copier_.column()) +
                        static_cast<int64_t>(copier_.row()) * row_bytes_)) {
    static_assert(Copier::kRowStep % 8 == 0, "a thread's rows are swizzled alike");
  }

  // The stage that starts `start` rows down the matrix. is_whole: all of it exists.
  __device__ __forceinline__ void copy(uint32_t tile, int start, bool is_whole) const {
    if (is_whole) return copier_.copy(tile, source_at(start), step_bytes());
    copy_rows(tile, start, [](int) { return true; });
  }

  // The same without rows of the matrix for which exists(row) is false: they become zeros.
  template <class Exists>
  __device__ __forceinline__ void copy_rows(uint32_t tile, int start, Exists exists) const {
    const int first = copier_.row(), rows_left = rows_left_ - start;
    copier_.copy(tile, source_at(start), step_bytes(),
                 [&](int row) { return row - first < rows_left && exists(start + row); });
  }

  // What was row `rows` is row 0 from now on.
  __device__ __forceinline__ void advance(int rows) {
    source_ += static_cast<int64_t>(rows) * row_bytes_;
    rows_left_ -= rows;
  }

 private:
  using Copier = RowCopier<Tile, kRows, kThreads>;
  __device__ __forceinline__ const char* source_at(int start) const {
    return source_ + static_cast<int64_t>(start) * row_bytes_;
  }
  __device__ __forceinline__ int64_t step_bytes() const {
    return static_cast<int64_t>(row_bytes_) * Copier::kRowStep;
  }

  Copier copier_;
  int rows_left_, row_bytes_;
  const char* source_;
};

// Bf16x6Op with a single sum: a step's products are added up from zero, the smallest first, and
// then to it.
struct StagedBf16x6Op : Bf16x6Op {
  static constexpr int kSums = 4;

  static __device__ __forceinline__ void multiply_add(float (&c)[kSums], const A& a, const B& b) {
    float step[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int order = 2; order >= 0; --order) {
#pragma unroll
      for (int i = 0; i <= order; ++i) multiply(step, a, i, b, order - i);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) c[i] += step[i];
  }
};

// Fragments out of tiles whose rows are the depth, in the depth order of Op::load_a.
template <class Op, class Tile>
__device__ __forceinline__ void load_right(typename Op::B (&b)[2], Tile tile, int k_step,
                                           int column, int lane) {
  if constexpr (sizeof(typename Op::Element) == 2) {
    Op::load_b_transposed(b, tile, k_step, column, lane);
  } else {
    constexpr int kHalves = Op::kK / 8;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = Op::kK * k_step + 8 * half;
        // Where registers are short, a lane's part of the address is found anew.
        const int mine = Op::kSplits ? opaque(lane) : lane;
        const uint32_t first = load_shared_word(tile.lane_address(row, column + 8 * n, mine));
        const uint32_t second = load_shared_word(tile.lane_address(row + 4, column + 8 * n, mine));
        if constexpr (std::is_base_of_v<Bf16x6Op, Op>) {
          uint32_t parts[3];
          Op::split(parts, first, second);
#pragma unroll
          for (int i = 0; i < 3; ++i) b[n].parts[i][half] = parts[i];
        } else {
          b[n] = {{first, second}};
        }
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
    typename Op::A a;
#pragma unroll
    for (int half = 0; half < Op::kK / 8; ++half) {
      const int depth = Op::kK * k_step + 8 * half;
      uint32_t r[4];  // rows g and g + 8 at depth t, then at t + 4
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[i] = load_shared_word(tile.lane_address(depth + i / 2 * 4, row + i % 2 * 8, lane));
      }
      if constexpr (std::is_base_of_v<Bf16x6Op, Op>) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          uint32_t parts[3];
          Op::split(parts, r[low], r[2 + low]);
#pragma unroll
          for (int i = 0; i < 3; ++i) a.parts[i][2 * half + low] = parts[i];
        }
      } else {
        a = Op::prepare(r);
      }
    }
    return a;
  }
}

template <class Operator, int kWarps>
struct GemmShape {
  using Op = Operator;
  using Element = typename Op::Element;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kM = kGemmTileRows, kN = kGemmTileColumns;
  static constexpr int kDepthWarps = kWarps;
  static constexpr int kSteps = Op::kSplits ? 1 : 2;  // of a warp, a stage
  static constexpr int kDepth = kDepthWarps * kSteps * Op::kK;
  // Two blocks a multiprocessor also where it has 164 KB
  static constexpr int kStages = !Op::kSplits && kWarps == 8 ? 2 : 3;
  static_assert(kN == 32, "a warp has all columns");
  using LeftTile = SmemTile<Element, kDepth>;
  using LeftTransposedTile = DepthTile<Element, kM>;
  using RightTile = DepthTile<Element, kN>;

  static constexpr int kSumStride = kN + 8;  // accumulators are written without bank conflicts
  struct Stage {
    alignas(16) Element left[kM * kDepth];
    alignas(16) Element right[kDepth * kN];
  };
  struct Sums {
    alignas(16) float share[kDepthWarps][kM][kSumStride];
    float left[kThreads / kM][kM];
  };
  union SharedStorage {
    Stage stages[kStages];
    Sums sums;
  };
  // As many blocks a Hopper multiprocessor as registers allow
  static_assert(sizeof(SharedStorage) <= 12 * 1024 * kWarps, "16 warps a multiprocessor");
};

// Whether a token's row of the right operand may be read.
__device__ __forceinline__ bool token_exists(const GemmTask& p, int row) {
  const int batch = quotient(row, p.tokens), token = row - batch * p.tokens.value;
  return token < key_count(p.kv_lengths, batch, p.tokens.value) &&
         (p.key_keep == nullptr || p.key_keep[row]);
}

// Copies stages of a task's left operand.
template <class Shape, bool kTransposed>
using LeftCopier = std::conditional_t<
    kTransposed, DepthCopier<typename Shape::LeftTransposedTile, Shape::kDepth, Shape::kThreads>,
    StageCopier<typename Shape::LeftTile, Shape::kM, Shape::kThreads>>;

template <class Shape, bool kTransposed>
__device__ __forceinline__ LeftCopier<Shape, kTransposed> make_left_copier(
    const GemmTask& p, const typename Shape::Element* left, int first_row, int thread) {
  if constexpr (kTransposed) {
    return {left + first_row, p.depth, p.rows, p.rows - first_row, thread};
  } else {
    return {left, first_row, p.rows, p.depth, thread};
  }
}

// c += this warp's share of a stage.
template <class Shape, bool kTransposed>
__device__ __forceinline__ void multiply_gemm_stage(float (&c)[2][4][4],
                                                    typename Shape::Stage& shared, int share,
                                                    int lane) {
  using Op = typename Shape::Op;
  const typename Shape::RightTile right{{shared.right}};
#pragma unroll(Op::kSplits ? 1 : Shape::kSteps)
  for (int step = 0; step < Shape::kSteps; ++step) {
    const int k = share * Shape::kSteps + step;
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
      load_right<Op>(b, right, k, 8 * n, lane);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Op::multiply_add(c[m][n], a[m], b[0]);
        Op::multiply_add(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// Where a thread stores its sums. Found while copies are under way: after the products everybody
// would wait for it.
template <class Shape>
struct GemmPlace {
  static constexpr int kCount = 4;  // columns a thread has: widths are multiples of 8
  static constexpr int kRowStep = Shape::kThreads / (Shape::kN / kCount);
  static __device__ __forceinline__ int row(int thread) { return thread / (Shape::kN / kCount); }
  static __device__ __forceinline__ int column(int thread) {
    return thread % (Shape::kN / kCount) * kCount;
  }

  char* out;    // of the first row
  int rows;     // from there on; none where the columns do not exist
  int columns;  // of the result

  __device__ __forceinline__ GemmPlace(const GemmTask& p, int first_row, int first_column,
                                       int thread)
      : columns(p.columns) {
    const int at_row = first_row + row(thread), at_column = first_column + column(thread);
    out = settled(reinterpret_cast<char*>(static_cast<typename Shape::Element*>(p.out) +
                                          static_cast<int64_t>(at_row) * columns + at_column));
    rows = at_column < columns ? p.rows - at_row : 0;
  }
};

// Adds up the shares of the depth in a fixed order, rounds once and stores.
template <class Shape>
__device__ __forceinline__ void finish_gemm_tile(const GemmTask& p, const GemmPlace<Shape>& place,
                                                 const typename Shape::Sums& sums, int first_row,
                                                 bool sum_left, int thread) {
  using Element = typename Shape::Element;
  using Place = GemmPlace<Shape>;
  constexpr int kCount = Place::kCount, kRowStep = Place::kRowStep;
  const int first = Place::row(thread), local_column = Place::column(thread);
#pragma unroll
  for (int i = 0; i < Shape::kM / kRowStep; ++i) {
    const int row = first + i * kRowStep;
    if (i * kRowStep >= place.rows) break;
    float sum[kCount] = {};
#pragma unroll
    for (int share = 0; share < Shape::kDepthWarps; ++share) {
      const float4 part = *reinterpret_cast<const float4*>(&sums.share[share][row][local_column]);
      sum[0] += part.x;
      sum[1] += part.y;
      sum[2] += part.z;
      sum[3] += part.w;
    }
    Storage<Element>::store(place.out, DType(), static_cast<int64_t>(i * kRowStep) * place.columns,
                            sum);
  }
  if (sum_left && thread < Shape::kM && first_row + thread < p.rows) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < Shape::kThreads / Shape::kM; ++part) sum += sums.left[part][thread];
    static_cast<Element*>(p.left_sums)[first_row + thread] = from_float<Element>(sum);
  }
}

template <class Shape>
__device__ __forceinline__ void store_gemm_share(typename Shape::Sums& sums,
                                                 const float (&c)[2][4][4], int share, int lane) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float (&sum)[4] = c[m][n];
      const int row = 16 * m + lane / 4, column = 8 * n + 2 * (lane % 4);
      store2(&sums.share[share][row][column], sum[0], sum[1]);
      store2(&sums.share[share][row + 8][column], sum[2], sum[3]);
    }
  }
}

template <class Shape, bool kTransposed>
__device__ __forceinline__ void multiply_gemm_tile(const GemmTask& p, int first_row,
                                                   int first_column,
                                                   typename Shape::SharedStorage& shared) {
  using Op = typename Shape::Op;
  using Element = typename Op::Element;
  using RightTile = typename Shape::RightTile;
  constexpr int kDepth = Shape::kDepth, kStages = Shape::kStages;
  const int thread = threadIdx.x, lane = thread % 32, share = thread / 32;
  // The stages of the first term, then those of the second.
  const int term_stages = ceil_div(p.depth, kDepth), num_stages = p.num_terms * term_stages;
  const bool is_deep = p.depth % kDepth == 0, has_right = p.columns > 0;
  const bool removes_tokens = p.kv_lengths != nullptr || p.key_keep != nullptr;
  const bool is_left_whole = is_deep && first_row + Shape::kM <= p.rows;
  const bool is_right_whole = is_deep && first_column + Shape::kN <= p.columns;
  // Copiers that move on from stage to stage, and from the first term to the second; where
  // registers are short the right one is made anew instead.
  auto right_copier = [&](int term) {
    return DepthCopier<RightTile, kDepth, Shape::kThreads>(
        static_cast<const Element*>(p.terms[term].right) + first_column, p.depth, p.columns,
        p.columns - first_column, Op::kSplits ? opaque(thread) : thread);
  };
  auto left_copier = [&](int term) {
    return make_left_copier<Shape, kTransposed>(p, static_cast<const Element*>(p.terms[term].left),
                                                first_row, thread);
  };
  auto right = right_copier(0);
  auto left = left_copier(0);
  auto load_right_stage = [&](int i, int slot) {
    if (i >= num_stages || !has_right) return;
    const uint32_t tile = shared_address(shared.stages[slot].right);
    const int start = (i < term_stages ? i : i - term_stages) * kDepth;
    if constexpr (Op::kSplits) {
      right = right_copier(i >= term_stages);
      right.advance(start);
    }
    if (removes_tokens) {
      right.copy_rows(tile, 0, [&](int row) { return token_exists(p, start + row); });
    } else {
      right.copy(tile, 0, is_right_whole);
    }
    if constexpr (Op::kSplits) return;
    right.advance(kDepth);
    if (i + 1 == term_stages && i + 1 < num_stages) right = right_copier(1);
  };
  auto load_left_stage = [&](int i, int slot) {
    if (i < num_stages) {
      left.copy(shared_address(shared.stages[slot].left), 0, is_left_whole);
      left.advance(kDepth);
      if (i + 1 == term_stages && i + 1 < num_stages) left = left_copier(1);
    }
    commit_copies();  // also an empty group, so that counting them is counting stages
  };
  // Complete with the first stage of the left operand
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) load_right_stage(i, i);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) load_left_stage(i, i);
  let_next_kernel_start();
  const GemmPlace<Shape> place(p, first_row, first_column, thread);

  // One column of tiles also sums the left operand: a thread every kRowParts-th row of a column.
  constexpr int kRowParts = Shape::kThreads / Shape::kM;
  const bool sum_left = kTransposed && p.left_sums != nullptr && first_column == 0;
  float c[2][4][4] = {}, left_sum = 0.f;
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    wait_copies<kStages - 1>();
    __syncthreads();  // stage i is here
    auto& stage = shared.stages[slot];
    multiply_gemm_stage<Shape, kTransposed>(c, stage, share, lane);
    if (sum_left) {
      const typename Shape::LeftTransposedTile left{{stage.left}};
      float sum[4] = {};  // of this stage: short chains, which round little
#pragma unroll 1
      for (int row = 0; row < kDepth; row += 4 * kRowParts) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum[k] += left.value(row + k * kRowParts + thread / Shape::kM, thread % Shape::kM);
        }
      }
      left_sum += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    if (i + kStages < num_stages) {
      __syncthreads();  // every warp is done with this stage
      load_right_stage(i + kStages, slot);
    }
    load_left_stage(i + kStages, slot);
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }

  // Every share of the depth to shared memory, in place of the stages
  __syncthreads();  // every warp is done with the last stage
  auto& sums = shared.sums;
  store_gemm_share<Shape>(sums, c, share, lane);
  if (sum_left) sums.left[thread / Shape::kM][thread % Shape::kM] = left_sum;
  __syncthreads();  // all shares are written
  finish_gemm_tile<Shape>(p, place, sums, first_row, sum_left, thread);
}

// One tile of a group, counted over all of its products, by a whole block.
template <class Shape>
__device__ __forceinline__ void multiply_group_tile(const GemmGroup& group, int tile, char* smem) {
  auto& shared = *reinterpret_cast<typename Shape::SharedStorage*>(smem);
  int member = 0;
  while (tile >= group.tiles[member]) tile -= group.tiles[member++];
  const GemmTask& p = group.tasks[member];
  const int row_tile = quotient(tile, p.column_tiles);
  const int first_row = row_tile * kGemmTileRows;
  const int first_column = (tile - row_tile * p.column_tiles.value) * kGemmTileColumns;
  if (p.left_transposed) {
    multiply_gemm_tile<Shape, true>(p, first_row, first_column, shared);
  } else {
    multiply_gemm_tile<Shape, false>(p, first_row, first_column, shared);
  }
}

// Where products have a launch of their own, a block has eight warps: there are few tiles, and the
// products of a small block are bound by how long a warp takes.
template <class Op>
using WideGemmShape = GemmShape<Op, 8>;

// Blocks that share a multiprocessor, bounded by registers, of which split operands take more
// before Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <class Op>
constexpr int kGemmBlocks = Op::kSplits ? 1 : 2;
#else
template <class Op>
constexpr int kGemmBlocks = 2;
#endif

template <class Op>
__global__ __launch_bounds__(WideGemmShape<Op>::kThreads, kGemmBlocks<Op>) void grouped_gemm_kernel(
    const __grid_constant__ BlockProductParams p) {
  extern __shared__ __align__(16) char smem[];
  if (!p.follows_kernel) wait_for_previous_kernel();
  multiply_group_tile<WideGemmShape<Op>>(p.group, blockIdx.x, smem);
}

}  // namespace frx
