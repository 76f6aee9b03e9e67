// One tile of a projection, out = rotate(x @ weight^T + bias), by a whole block.
//
// Eight warps: two along the rows, kN / 32 along the columns, the rest shares the depth, so that a
// small tile keeps all of them busy. Copies run several stages ahead of the products. While the
// first ones are under way each thread computes the angles of its pairs; in the end the shares of
// the depth meet in shared memory, in fp32, where a thread finds both members of a pair.
#pragma once

#include "block_params.h"
#include "mma.cuh"
#include "positions.cuh"
#include "rope.cuh"
#include "storage.cuh"
#include "tile.cuh"

namespace frx {

constexpr int kBlockThreads = 256;
constexpr int kBlockSmemBytes = 96 * 1024;  // what every GPU since sm_80 gives a block

template <class Op, int kN, int kMT>
struct ProjectionShape {
  using Element = typename Op::Element;
  static constexpr int kM = 32 * kMT;
  static constexpr int kColumnWarps = kN / 32;
  static constexpr int kDepthWarps = kBlockThreads / 32 / 2 / kColumnWarps;
  static constexpr int kDepth = 128 / sizeof(Element);          // a stage: 128 bytes of every row
  static constexpr int kSteps = kDepth / Op::kK / kDepthWarps;  // of a warp, a stage
  using Tile = SmemTile<Element, kDepth>;

  static constexpr int kStageElements = (kM + kN) * kDepth;
  static constexpr int kStageBytes = kStageElements * sizeof(Element);
  static constexpr int kFitting = kBlockSmemBytes / kStageBytes;
  static constexpr int kStages = kFitting < 6 ? kFitting : 6;

  // Rows 32 bytes apart modulo 128: accumulators are written without bank conflicts.
  static constexpr int kSumStride = kN + 8;
  static constexpr int kSumElements = kM * kSumStride;
  static_assert(kDepthWarps * kSumElements * sizeof(float) <= kBlockSmemBytes, "sums fit");

  // The pairs of one thread: one pair of columns in every kRowStep-th row.
  static constexpr int kRowStep = kBlockThreads / (kN / 2);
  static constexpr int kRowsAThread = kM / kRowStep;
};

// Two columns of a projection that are handled together, and the rotation that turns them.
struct ColumnPair {
  int first, second;
  int head;
  int pair;  // within the head; negative where nothing rotates
};

__device__ __forceinline__ ColumnPair column_pair(const ProjectionParams& p, int column) {
  const RotationParams& r = p.rotation;
  if (r.rotary_dim > 0) {
    const int head = column / p.head_dim, start = head * p.head_dim, pair = (column - start) / 2;
    if (pair < r.rotary_dim / 2) {
      const PairDims dims = pair_dims(pair, r.rotary_dim, r.axes, r.interleaved);
      return {start + dims.first, start + dims.second, head, pair};
    }
  }
  return {column, column + 1, 0, -1};
}

// Cosine and sine from a table, at the pair or, of a full-width table, at the column.
__device__ __forceinline__ CosSin table_entry(const ProjectionParams& p, const ColumnPair& columns,
                                              int row, int column) {
  const RotationParams& r = p.rotation;
  const int batch = row / p.tokens, token = row - batch * p.tokens;
  const int index = r.full_width ? column - columns.head * p.head_dim : columns.pair;
  const int64_t entry = batch * r.table_batch_stride + token * r.table_token_stride +
                        columns.head * r.table_head_stride + index;
  return {r.cos[entry], r.sin[entry]};
}

// angles[i] of the pair in rows first_row + i * row_step.
template <int kCount>
__device__ __forceinline__ void find_angles(CosSin (&angles)[kCount], const ProjectionParams& p,
                                            const ColumnPair& columns, int first_row,
                                            int row_step) {
  const RotationParams& r = p.rotation;
  if (columns.pair < 0) return;
  const int half_width = r.rotary_dim / r.axes / 2, axis = columns.pair / half_width;
  const double frequency = r.cos != nullptr ? 0.0
                                            : inverse_frequency(columns.pair - axis * half_width,
                                                                2 * half_width, r.log2_base);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = min(first_row + i * row_step, p.rows - 1);
    if (r.cos != nullptr) {
      angles[i] = table_entry(p, columns, row, columns.first);
    } else {
      const int batch = row / p.tokens, token = row - batch * p.tokens;
      angles[i] = cos_sin(turns_of(position_of(r, batch, token, axis), frequency));
    }
  }
}

// c += the products of one stage that are this warp's.
template <class Shape, class Op, int kMT>
__device__ __forceinline__ void multiply_stage(float (&c)[kMT][4][4], typename Shape::Tile x_tile,
                                               typename Shape::Tile weight_tile, int warp_row,
                                               int warp_column, int first_step, int lane) {
#pragma unroll(Op::kDepthUnroll)
  for (int k = 0; k < Shape::kSteps; ++k) {
    typename Op::A a[kMT];
#pragma unroll
    for (int m = 0; m < kMT; ++m) {
      a[m] = Op::load_a(x_tile, warp_row + 16 * m, first_step + k, lane);
    }
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      typename Op::B b[2];
      Op::load_b(b, weight_tile, warp_column + 8 * n, first_step + k, lane);
#pragma unroll
      for (int m = 0; m < kMT; ++m) {
        Op::multiply_add(c[m][n], a[m], b[0]);
        Op::multiply_add(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// Sums the shares of the depth, adds the bias, rotates, rounds once and stores.
template <class Shape, int kCount>
__device__ __forceinline__ void finish_tile(const ProjectionParams& p, const float* sums,
                                            const ColumnPair& columns,
                                            const CosSin (&angles)[kCount], int first_row,
                                            int first_column, int thread_row) {
  using Element = typename Shape::Element;
  if (columns.first >= p.columns) return;
  Pair bias = {0.f, 0.f};
  if (p.bias != nullptr) {
    const Element* values = static_cast<const Element*>(p.bias);
    bias = {to_float(values[columns.first]), to_float(values[columns.second])};
  }
  const float* first_sums = sums + columns.first - first_column;
  const float* second_sums = sums + columns.second - first_column;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int tile_row = thread_row + i * Shape::kRowStep, row = first_row + tile_row;
    if (row >= p.rows) return;
    Pair value = bias;
#pragma unroll
    for (int share = 0; share < Shape::kDepthWarps; ++share) {
      const int at = share * Shape::kSumElements + tile_row * Shape::kSumStride;
      value.first += first_sums[at];
      value.second += second_sums[at];
    }
    if (columns.pair >= 0) {
      const CosSin second =
          p.rotation.full_width ? table_entry(p, columns, row, columns.second) : angles[i];
      value = rotate(value, angles[i], second);
    }
    Element* out = static_cast<Element*>(p.out) + static_cast<int64_t>(row) * p.columns;
    if (columns.second == columns.first + 1) {
      store2(out + columns.first, value.first, value.second);
    } else {
      out[columns.first] = from_float<Element>(value.first);
      out[columns.second] = from_float<Element>(value.second);
    }
  }
}

template <class Op, int kN, int kMT>
__device__ __forceinline__ void project_tile(const ProjectionParams& p, int first_row,
                                             int first_column, char* smem) {
  using Shape = ProjectionShape<Op, kN, kMT>;
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  // Opaque, so that nothing derived from it is kept in registers beyond this tile.
  const int thread = opaque(threadIdx.x);
  Element* stages = reinterpret_cast<Element*>(smem);
  const Element* x = static_cast<const Element*>(p.x) + static_cast<int64_t>(first_row) * p.depth;
  const Element* weight =
      static_cast<const Element*>(p.weight) + static_cast<int64_t>(first_column) * p.depth;
  const int num_stages = ceil_div(p.depth, Shape::kDepth);
  auto x_tile = [&](int i) { return Tile{stages + i % Shape::kStages * Shape::kStageElements}; };
  auto weight_tile = [&](int i) { return Tile{x_tile(i).data + Shape::kM * Shape::kDepth}; };
  auto load = [&](int i) {
    if (i < num_stages) {
      const int start = i * Shape::kDepth;
      load_tile<Shape::kM, kBlockThreads>(
          x_tile(i), x + start, p.depth, p.depth - start,
          [&](int row) { return first_row + row < p.rows; }, thread);
      load_tile<kN, kBlockThreads>(
          weight_tile(i), weight + start, p.depth, p.depth - start,
          [&](int row) { return first_column + row < p.columns; }, thread);
    }
    commit_copies();  // also an empty group, so that counting them is counting stages
  };
  for (int i = 0; i < Shape::kStages - 1; ++i) load(i);

  // Angles, while the first copies are under way
  const int thread_row = thread / (kN / 2);
  const ColumnPair columns = column_pair(p, first_column + thread % (kN / 2) * 2);
  CosSin angles[Shape::kRowsAThread];
  find_angles(angles, p, columns, first_row + thread_row, Shape::kRowStep);

  // Products
  const int lane = thread % 32, warp = thread / 32;
  const int warp_row = warp % 2 * 16 * kMT, warp_column = warp / 2 % Shape::kColumnWarps * 32;
  const int share = warp / 2 / Shape::kColumnWarps;
  float c[kMT][4][4] = {};
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    wait_copies<Shape::kStages - 2>();
    __syncthreads();  // stage i is here, and every warp is done with stage i - 1
    load(i + Shape::kStages - 1);
    multiply_stage<Shape, Op>(c, x_tile(i), weight_tile(i), warp_row, warp_column,
                              share * Shape::kSteps, lane);
  }

  // Every share of the depth to shared memory, in place of the stages
  float* sums = reinterpret_cast<float*>(smem);
  wait_copies<0>();
  __syncthreads();  // every warp is done with the last stage
#pragma unroll
  for (int m = 0; m < kMT; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float* at = sums + share * Shape::kSumElements +
                  (warp_row + 16 * m + lane / 4) * Shape::kSumStride + warp_column + 8 * n +
                  2 * (lane % 4);
      store2(at, c[m][n][0], c[m][n][1]);
      store2(at + 8 * Shape::kSumStride, c[m][n][2], c[m][n][3]);
    }
  }
  __syncthreads();  // all shares are written
  finish_tile<Shape>(p, sums, columns, angles, first_row, first_column, thread_row);
  __syncthreads();  // shared memory may be written again
}

// This block's tiles of a group.
template <class Op, int kN, int kMT>
__device__ __forceinline__ void project_tiles(const ProjectionGroup& group, char* smem) {
  using Shape = ProjectionShape<Op, kN, kMT>;
  int tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < group.count; ++i) {
    const ProjectionParams& p = group.members[i];
    const int column_tiles = ceil_div(p.columns, kN);
    const int tiles = ceil_div(p.rows, Shape::kM) * column_tiles;
#pragma unroll 1
    for (; tile < tiles; tile += gridDim.x) {
      project_tile<Op, kN, kMT>(p, tile / column_tiles * Shape::kM, tile % column_tiles * kN, smem);
    }
    tile -= tiles;
  }
}

}  // namespace frx
