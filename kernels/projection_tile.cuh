// One tile of a projection, out = rotate(x @ weight^T + bias), by a whole block.
//
// Eight warps: up to two along the rows, one for each 32 columns, the rest shares the depth, so
// that a small tile keeps all of them busy. Copies run several stages ahead of the products. While
// the first ones are under way each thread computes the angles of its pairs; in the end the shares
// of the depth meet in shared memory, in fp32, where a thread finds both members of a pair.
#pragma once

#include "block_params.h"
#include "block_turns.cuh"
#include "chained_launch.cuh"
#include "mma.cuh"
#include "rope.cuh"
#include "row_copier.cuh"
#include "storage.cuh"
#include "tile.cuh"

namespace frx {

constexpr int kBlockThreads = 256;

template <class Op, int kColumns, int kRows>
struct ProjectionShape {
  using Element = typename Op::Element;
  static constexpr int kM = kRows, kN = kColumns;
  static constexpr int kRowWarps = kM >= 32 ? 2 : 1;
  static constexpr int kMT = kM / 16 / kRowWarps;
  static constexpr bool kIsNarrow = kN == kBlockNarrowColumns;
  static constexpr int kColumnWarps = kIsNarrow ? 1 : kN / 32;
  static constexpr int kNT = kN / 8 / kColumnWarps;  // products of eight columns a warp
  static constexpr int kDepthWarps = kBlockThreads / 32 / kRowWarps / kColumnWarps;
  // A stage: 256 bytes of every row, or 512 of few.
  static constexpr int kLine = (kM + kN <= 48 ? 512 : 256) / static_cast<int>(sizeof(Element));
  static constexpr int kDepth = kLine > kDepthWarps* Op::kK ? kLine : kDepthWarps * Op::kK;
  static constexpr int kSteps = kDepth / Op::kK / kDepthWarps;  // of a warp, a stage
  using Tile = SmemTile<Element, kDepth>;

  // Shared memory for as many blocks as registers allow on a Hopper multiprocessor, within what
  // every GPU since sm_80 gives one block.
  static constexpr int kResidents = block_residents(kN, kM, Op::kSplits);
  static constexpr int kSmemABlock = kResidents == 3 ? 72 * 1024 : 96 * 1024;
  static constexpr int kStageElements = (kM + kN) * kDepth;
  static constexpr int kStageBytes = kStageElements * static_cast<int>(sizeof(Element));
  static constexpr int kFitting = kSmemABlock / kStageBytes;
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;
  static_assert(kStages >= 2, "one stage is multiplied while the next arrives");

  // Rows 32 bytes apart modulo 128: accumulators are written without bank conflicts.
  static constexpr int kSumStride = kN + 8;
  static constexpr int kSumElements = kM * kSumStride;
  static constexpr int kSumBytes = kDepthWarps * kSumElements * static_cast<int>(sizeof(float));

  // The pairs of one thread: one pair of columns in every kRowStep-th row. Of a narrow tile half of
  // the threads have none.
  static constexpr int kRowStep = kBlockThreads / (kN / 2);
  static constexpr int kRowsAThread = (kM + kRowStep - 1) / kRowStep;

  static constexpr int kSmemBytes =
      kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static_assert(kSmemBytes <= 96 * 1024, "what every GPU since sm_80 gives a block");
  static_assert(kM % kRowStep == 0 || kIsNarrow, "every thread has as many pairs");
};

// Two columns of a projection that are handled together, and the rotation that turns them.
struct ColumnPair {
  int first, second;
  int head;
  int axis;
  int pair;  // within the head; negative where nothing rotates
};

__device__ __forceinline__ ColumnPair column_pair(const ProjectionParams& p, int column) {
  const BlockRotation& r = p.rotation;
  if (r.rotary_dim > 0) {
    const int head = column >> p.head_shift, start = head << p.head_shift;
    const int pair = (column - start) / 2;
    if (pair < r.rotary_dim / 2) {
      const int axis = quotient(pair, r.axis_pairs), half_width = r.axis_pairs.value;
      const int first = start + (r.interleaved ? 2 * pair : pair + axis * half_width);
      return {first, first + (r.interleaved ? 1 : half_width), head, axis, pair};
    }
  }
  return {column, column + 1, 0, 0, -1};
}

// Cosine and sine from a table, at the pair or, of a full-width table, at the column.
__device__ __forceinline__ CosSin table_entry(const ProjectionParams& p, const ColumnPair& columns,
                                              int row, int column) {
  const BlockRotation& r = p.rotation;
  const int batch = quotient(row, p.tokens), token = row - batch * p.tokens.value;
  const int index = r.full_width ? column - (columns.head << p.head_shift) : columns.pair;
  const int64_t entry = batch * r.table_batch_stride + token * r.table_token_stride +
                        columns.head * r.table_head_stride + index;
  return {r.cos[entry], r.sin[entry]};
}

__device__ __forceinline__ uint64_t load_turns(const BlockRotation& r, const ColumnPair& columns) {
  const bool has_turns = columns.pair >= 0 && r.cos == nullptr;
  return has_turns ? load_turns(r, columns.pair, columns.axis) : 0;
}

// angles[i] of the pair in rows first_row + i * row_step. Three loops, each free of branches, so
// that the angles of a thread are worked out side by side.
template <int kCount>
__device__ __forceinline__ void find_angles(CosSin (&angles)[kCount], const ProjectionParams& p,
                                            const ColumnPair& columns, uint64_t turns,
                                            int first_row, int row_step) {
  const BlockRotation& r = p.rotation;
  if (columns.pair < 0) return;
  if (r.cos != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = min(first_row + i * row_step, p.rows - 1);
      angles[i] = table_entry(p, columns, row, columns.first);
    }
    return;
  }
  if (r.positions == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = min(first_row + i * row_step, p.rows - 1);
      const int token = row - quotient(row, p.tokens) * p.tokens.value;
      angles[i] = cos_sin_of_turn(fraction_of_turn({token, 0}, turns));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = min(first_row + i * row_step, p.rows - 1);
    const int batch = quotient(row, p.tokens), token = row - batch * p.tokens.value;
    angles[i] =
        cos_sin_of_turn(fraction_of_turn(fixed_position_of(r, batch, token, columns.axis), turns));
  }
}

// Copies stages of kRows rows of a [rows, depth] matrix to shared memory.
template <class Tile, int kRows, int kThreads = kBlockThreads>
class StageCopier {
 public:
  template <class Element>
  __device__ __forceinline__ StageCopier(const Element* matrix, int first_row, int rows, int depth,
                                         int thread)
      : copier_(thread),
        depth_left_(depth - copier_.column()),
        rows_left_(rows - first_row),
        step_bytes_(static_cast<int64_t>(depth) * (Copier::kRowStep * sizeof(Element))) {
    const int row = copier_.row() < rows_left_ ? first_row + copier_.row() : 0;
    source_ = settled(reinterpret_cast<const char*>(matrix + static_cast<int64_t>(row) * depth +
                                                    copier_.column()));
  }

  // The columns of a narrow tile that starts at `first_column`, rows of the weight: the first ones
  // of its pairs, then the second ones.
  template <class Element>
  __device__ __forceinline__ StageCopier(const Element* weight, const ProjectionParams& p,
                                         int first_column, int thread)
      : copier_(thread), depth_left_(p.depth - copier_.column()) {
    const ColumnPair pair = column_pair(p, first_column + copier_.row() % 8 * 2);
    const bool exists = pair.first < p.columns;
    rows_left_ = exists ? kRows : 0;
    step_bytes_ = static_cast<int64_t>(pair.second - pair.first) * p.depth * sizeof(Element);
    const int row = !exists ? 0 : copier_.row() < 8 ? pair.first : pair.second;
    static_assert(Copier::kRowStep >= 8, "a thread's rows are those of one pair");
    source_ = settled(reinterpret_cast<const char*>(weight + static_cast<int64_t>(row) * p.depth +
                                                    copier_.column()));
  }

  // The stage that starts `start` elements down the depth, to the address of its tile. is_whole:
  // every row and all of the stage's depth exist.
  __device__ __forceinline__ void copy(uint32_t tile, int start, bool is_whole) const {
    constexpr int kElementBytes = 16 / Tile::kChunkElements;
    if (is_whole) return copier_.copy(tile, source_ + start * kElementBytes, step_bytes_);
    const int rows = start < depth_left_ ? rows_left_ : 0;
    copier_.copy(tile, source_ + (rows > 0 ? start * kElementBytes : 0), step_bytes_,
                 [&](int row) { return row < rows; });
  }

  // What was at `depth` is at 0 from now on.
  __device__ __forceinline__ void advance(int depth) {
    source_ += depth * (16 / Tile::kChunkElements);
    depth_left_ -= depth;
  }

 private:
  using Copier = RowCopier<Tile, kRows, kThreads>;
  Copier copier_;
  int depth_left_, rows_left_;
  int64_t step_bytes_;
  const char* source_;
};

// c += the products of one stage that are this warp's.
template <class Op, class Shape>
__device__ __forceinline__ void multiply_stage(float (&c)[Shape::kMT][Shape::kNT][Op::kSums],
                                               typename Shape::Tile x_tile,
                                               typename Shape::Tile weight_tile, int warp_row,
                                               int warp_column, int first_step, int lane) {
#pragma unroll(Op::kDepthUnroll)
  for (int k = 0; k < Shape::kSteps; ++k) {
    typename Op::A a[Shape::kMT];
#pragma unroll
    for (int m = 0; m < Shape::kMT; ++m) {
      a[m] = Op::load_a(x_tile, warp_row + 16 * m, first_step + k, lane);
    }
#pragma unroll
    for (int n = 0; n < Shape::kNT; n += 2) {
      typename Op::B b[2];
      Op::load_b(b, weight_tile, warp_column + 8 * n, first_step + k, lane);
#pragma unroll
      for (int m = 0; m < Shape::kMT; ++m) {
        Op::multiply_add(c[m][n], a[m], b[0]);
        Op::multiply_add(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

template <class Element>
__device__ __forceinline__ Pair bias_of(const ProjectionParams& p, const ColumnPair& columns) {
  if (p.bias == nullptr || columns.first >= p.columns) return {0.f, 0.f};
  const Element* bias = static_cast<const Element*>(p.bias);
  return {to_float(bias[columns.first]), to_float(bias[columns.second])};
}

// Where a thread's pairs of the result lie. Found while copies are under way: after the products
// everybody would wait for it.
struct ResultPlace {
  char* out;  // the first member of the first row's pair
  int rows;   // from there on; none where the columns do not exist
  int row_bytes;
  int second;  // elements from a pair's first member to its second one
};

template <class Element>
__device__ __forceinline__ ResultPlace result_place(const ProjectionParams& p,
                                                    const ColumnPair& columns, int row) {
  constexpr int kBytes = sizeof(Element);
  const int64_t first = static_cast<int64_t>(row) * p.columns + columns.first;
  return {settled(static_cast<char*>(p.out) + first * kBytes),
          columns.first < p.columns ? p.rows - row : 0, p.columns * kBytes,
          columns.second - columns.first};
}

// Sums the shares of the depth, adds the bias, rotates, rounds once and stores. first: where the
// thread's first column is within the tile, and `second` further on its second one.
template <class Shape, int kCount>
__device__ __forceinline__ void finish_tile(const ProjectionParams& p, const char* smem,
                                            const ColumnPair& columns, const ResultPlace& place,
                                            int first, int second, Pair bias,
                                            const CosSin (&angles)[kCount], int row,
                                            int thread_row) {
  using Element = typename Shape::Element;
  const float* sums = reinterpret_cast<const float*>(smem);
  Pair values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = bias;
#pragma unroll
    for (int share = 0; share < Shape::kDepthWarps; ++share) {
      const float* at = sums + share * Shape::kSumElements +
                        (thread_row + i * Shape::kRowStep) * Shape::kSumStride + first;
      const float2 both =
          second == 1 ? *reinterpret_cast<const float2*>(at) : make_float2(at[0], at[second]);
      values[i].first += both.x;
      values[i].second += both.y;
    }
  }
  if (columns.pair >= 0 && p.rotation.full_width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = min(row + i * Shape::kRowStep, p.rows - 1);
      values[i] = rotate(values[i], angles[i], table_entry(p, columns, at, columns.second));
    }
  } else if (columns.pair >= 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = rotate(values[i], angles[i].cos, angles[i].sin);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i * Shape::kRowStep >= place.rows) continue;
    auto* out = reinterpret_cast<Element*>(place.out + i * Shape::kRowStep *
                                                           static_cast<int64_t>(place.row_bytes));
    if (place.second == 1) {
      store2(out, values[i].first, values[i].second);
    } else {
      out[0] = from_float<Element>(values[i].first);
      out[place.second] = from_float<Element>(values[i].second);
    }
  }
}

template <class Shape, class Element>
__device__ __forceinline__ auto make_weight_copier(const Element* weight, const ProjectionParams& p,
                                                   int first_column, int thread) {
  using Copier = StageCopier<typename Shape::Tile, Shape::kN>;
  if constexpr (Shape::kIsNarrow) {
    return Copier(weight, p, first_column, thread);
  } else {
    return Copier(weight, first_column, p.columns, p.depth, thread);
  }
}

template <class Op, class Shape>
__device__ __forceinline__ void project_tile(const ProjectionParams& p, bool follows_kernel,
                                             int first_row, int first_column, char* smem) {
  using Element = typename Op::Element;
  using Tile = typename Shape::Tile;
  constexpr int kMT = Shape::kMT, kStages = Shape::kStages;
  // Opaque, so that nothing derived from it is kept in registers beyond this tile.
  const int thread = opaque(threadIdx.x);
  Element* stages = reinterpret_cast<Element*>(smem);
  auto x_tile = [&](int slot) { return Tile{stages + slot * Shape::kStageElements}; };
  auto weight_tile = [&](int slot) { return Tile{x_tile(slot).data + Shape::kM * Shape::kDepth}; };
  const StageCopier<Tile, Shape::kM> x_copier(static_cast<const Element*>(p.x), first_row, p.rows,
                                              p.depth, thread);
  const auto weight_copier =
      make_weight_copier<Shape>(static_cast<const Element*>(p.weight), p, first_column, thread);
  const int num_stages = ceil_div(p.depth, Shape::kDepth);
  const bool is_whole = p.depth % Shape::kDepth == 0 && first_row + Shape::kM <= p.rows &&
                        first_column + Shape::kN <= p.columns;
  auto load_x = [&](int i, int slot) {
    if (i < num_stages) {
      x_copier.copy(x_tile(slot).address(0, 0), i * Shape::kDepth, is_whole);
    }
    commit_copies();  // also an empty group, so that counting them is counting stages
  };
  auto load_weight = [&](int i, int slot) {
    if (i >= num_stages) return;
    weight_copier.copy(weight_tile(slot).address(0, 0), i * Shape::kDepth, is_whole);
  };
  auto load_first_x = [&] {
#pragma unroll
    for (int i = 0; i < kStages; ++i) load_x(i, i);
  };
  const ColumnPair columns = column_pair(p, first_column + thread % (Shape::kN / 2) * 2);
  const uint64_t turns = load_turns(p.rotation, columns);
  // The last kernel of a call may let the next call's start at once: that one reads nothing before
  // it has waited. Where operands are split it is better let in behind this one's copies
  // (docs/design/small-backward.md).
  if (follows_kernel && !Op::kSplits) let_next_kernel_start();
  if (!follows_kernel) {
    // The first one lets others start when all that precedes the call is complete: they then may
    // read its arguments at once
    wait_for_previous_kernel();
  }
  // Complete with the first stage of x
#pragma unroll
  for (int i = 0; i < kStages; ++i) load_weight(i, i);
  if (!follows_kernel) {
    load_first_x();
    let_next_kernel_start();
  }

  // What the end needs, while the first copies are under way
  const int thread_row = thread / (Shape::kN / 2), row = first_row + thread_row;
  CosSin angles[Shape::kRowsAThread];
  find_angles(angles, p, columns, turns, row, Shape::kRowStep);
  const Pair bias = bias_of<Element>(p, columns);
  const ResultPlace place = result_place<Element>(p, columns, row);
  if (follows_kernel) {
    wait_for_previous_kernel();
    load_first_x();
    if (Op::kSplits) let_next_kernel_start();
  }

  // Products
  const int lane = thread % 32, warp = thread / 32;
  const int warp_row = warp % Shape::kRowWarps * 16 * kMT;
  const int warp_column = warp / Shape::kRowWarps % Shape::kColumnWarps * 32;
  const int share = warp / Shape::kRowWarps / Shape::kColumnWarps;
  float c[kMT][Shape::kNT][Op::kSums] = {};
  int slot = 0, free_slot = 0;
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    if (i == 0) {
      wait_copies<kStages - 1>();
    } else {
      wait_copies<kStages - 2>();
    }
    __syncthreads();  // stage i is here, and every warp is done with stage i - 1
    if (i > 0) {
      load_weight(i + kStages - 1, free_slot);
      load_x(i + kStages - 1, free_slot);
    }
    multiply_stage<Op, Shape>(c, x_tile(slot), weight_tile(slot), warp_row, warp_column,
                              share * Shape::kSteps, lane);
    free_slot = slot;
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }

  // Every share of the depth to shared memory, in place of the stages
  float* sums = reinterpret_cast<float*>(smem);
  wait_copies<0>();
  __syncthreads();  // every warp is done with the last stage
#pragma unroll
  for (int m = 0; m < kMT; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kNT; ++n) {
      float (&sum)[Op::kSums] = c[m][n];
#pragma unroll
      for (int i = 4; i < Op::kSums; ++i) sum[i - 4] += sum[i];
      float* at = sums + share * Shape::kSumElements +
                  (warp_row + 16 * m + lane / 4) * Shape::kSumStride + warp_column + 8 * n +
                  2 * (lane % 4);
      store2(at, sum[0], sum[1]);
      store2(at + 8 * Shape::kSumStride, sum[2], sum[3]);
    }
  }
  __syncthreads();  // all shares are written
  if (thread_row >= Shape::kM) return;
  const int first = Shape::kIsNarrow ? thread % 8 : columns.first - first_column;
  const int second = Shape::kIsNarrow ? 8 : place.second;
  finish_tile<Shape>(p, smem, columns, place, first, second, bias, angles, row, thread_row);
}

}  // namespace frx
