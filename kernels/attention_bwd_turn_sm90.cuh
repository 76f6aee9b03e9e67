// The way of dq and dk out of the Hopper backward through the rotation of q and k: what leaves is
// the gradient of the heads before they were rotated, rounded once.
//
// A warp holds 16 rows of a head as accumulators, in which the members of a pair may lie in any two
// registers. They go through shared memory, in fp32, and are turned there: by any number of axes,
// either pairing, tables or positions.
#pragma once

#include <cstdint>

#include "attention_bwd_sm90_parts.cuh"
#include "turns.cuh"

namespace frx {

constexpr int kWarpRows = 16;
constexpr int kMostPairs = 128;  // of a head

// Turns a position of each pair of an axis, in units of 2^-64; unused where tables are given.
struct PairTurns {
  uint64_t of_pair[kMostPairs];
};

// Blocks of keys: all, or those whose score gradients are kept (see gradient_windows.h).
struct KeyWindow {
  int32_t first_block, end_block;
  int32_t cluster;      // neighbours that walk over the same rows, 1 or 2
  int32_t first_split;  // as in WindowCut
};

struct Sm90BackwardParams {
  CUtensorMap q_map, k_map, v_map, dout_map;
  AttentionBackwardParams attention;
  PairTurns turns;  // of the side whose gradient the kernel makes
  // delta, and dq_parts where they are added to, are of the kernel just before; if not, nothing is.
  bool follows_delta;
  KeyWindow window;
};

// The same of a kernel that has the keys of a window, in blocks and pieces of blocks.
struct Sm90WindowParams : Sm90BackwardParams {
  WindowCut cut;
  PieceOrder order;  // pieces behind whole blocks
};

inline PairTurns plan_turns(const RotationParams& r) {
  PairTurns turns{};
  if (r.rotary_dim == 0 || r.cos != nullptr) return turns;
  const int pairs = r.rotary_dim / r.axes / 2;
  for (int i = 0; i < pairs; ++i) {
    turns.of_pair[i] = turns_a_position(inverse_frequency(i, 2 * pairs, r.log2_base));
  }
  return turns;
}

constexpr int kMostTurningAxes = 3;  // of positions

using StripPositions = FixedPosition[kMostTurningAxes][kWarpRows];

// 8 floats more than D: then neither the accumulators' nor the pairs' order has conflicts.
template <int kHeadDim>
using TurningRow = float[kHeadDim + 8];

// A warp's rows.
template <int kHeadDim>
struct TurningRows {
  TurningRow<kHeadDim> x[kWarpRows];
  StripPositions positions;
};

// Positions of the rows from first_row on, by `threads` of which this one is `thread`; unused where
// tables are given.
__device__ __forceinline__ void prepare_positions(StripPositions& positions,
                                                  const RotationParams& r, int64_t batch,
                                                  int first_row, int num_rows, int thread,
                                                  int threads) {
  if (r.rotary_dim == 0 || r.cos != nullptr) return;
#pragma unroll 1
  for (int i = thread; i < r.axes * kWarpRows; i += threads) {
    const int token = min(first_row + i % kWarpRows, num_rows - 1);
    positions[i / kWarpRows][i % kWarpRows] = fixed_position_of(r, batch, token, i / kWarpRows);
  }
}

constexpr int kTurningBatch = 4;  // rows under way at a time: one would be a chain of latencies

// How the lanes of a warp share the pairs of an axis in kRows rows: 2^log_width pairs side by side
// in a row, and as many rows at a time as there are lanes left and whole batches of rows.
template <int kRows>
struct PairLanes {
  int log_width;

  __device__ __forceinline__ explicit PairLanes(int pairs) : log_width(5) {
#pragma unroll
    for (int rows = 2; rows <= kRows / kTurningBatch; rows *= 2) {
      if (32 / rows >= pairs) --log_width;
    }
  }
  __device__ __forceinline__ int width() const { return 1 << log_width; }
  __device__ __forceinline__ int rows() const { return 32 >> log_width; }
  __device__ __forceinline__ int pair(int lane) const { return lane & (width() - 1); }
  __device__ __forceinline__ int row(int lane) const { return lane >> log_width; }
};

// A pair of dims that turn together: its number in its axis, and in a row of tables those of its
// two members' angles, which are one unless tables are as wide as the rotation.
struct TurningPair {
  int axis, of_axis;
  int first_angle, second_angle;
};

struct TurningAngles {
  CosSin first[kTurningBatch], second[kTurningBatch];
};

// kRows rows of a head turned back in place by a warp: a lane has a pair of all of them, or of
// every second or fourth. angles_of(TurningPair, the batch's rows) gives their angles. Loops stay
// loops: this code runs once, and then its length is its time.
template <int kRows, int kWidth, class AnglesOf>
__device__ __forceinline__ void turn_back(float (*x)[kWidth], const RotationParams& r,
                                          int axis_pairs, int lane, AnglesOf angles_of) {
  const PairLanes<kRows> lanes(axis_pairs);
#pragma unroll 1
  for (int axis = 0; axis < r.axes; ++axis) {
#pragma unroll 1
    for (int i = lanes.pair(lane); i < axis_pairs; i += lanes.width()) {
      const PairDims dims = axis_pair_dims(axis, i, axis_pairs, r.interleaved);
      const int of_all = axis * axis_pairs + i;
      const TurningPair pair = {axis, i, r.full_width ? dims.first : of_all,
                                r.full_width ? dims.second : of_all};
#pragma unroll 1
      for (int start = lanes.row(lane); start < kRows; start += kTurningBatch * lanes.rows()) {
        int rows[kTurningBatch];
        Pair g[kTurningBatch];
#pragma unroll
        for (int b = 0; b < kTurningBatch; ++b) {
          rows[b] = start + b * lanes.rows();
          g[b] = {x[rows[b]][dims.first], x[rows[b]][dims.second]};
        }
        const TurningAngles angles = angles_of(pair, rows);
#pragma unroll
        for (int b = 0; b < kTurningBatch; ++b) {
          const Pair y = rotate_back(g[b], angles.first[b], angles.second[b]);
          x[rows[b]][dims.first] = y.first;
          x[rows[b]][dims.second] = y.second;
        }
      }
    }
  }
}

// The angles of a head's rows from first_row on, from tables or the rows' positions.
__device__ __forceinline__ TurningAngles angles_of_rows(const RotationParams& r,
                                                        const PairTurns& turns,
                                                        const StripPositions& positions,
                                                        int64_t batch, int head, int first_row,
                                                        int num_rows, const TurningPair& pair,
                                                        const int (&rows)[kTurningBatch]) {
  TurningAngles angles;
  if (r.cos != nullptr) {
    const int64_t start = batch * r.table_batch_stride + head * r.table_head_stride;
#pragma unroll
    for (int b = 0; b < kTurningBatch; ++b) {
      const int64_t row = start + min(first_row + rows[b], num_rows - 1) * r.table_token_stride;
      angles.first[b] = {r.cos[row + pair.first_angle], r.sin[row + pair.first_angle]};
      angles.second[b] = {r.cos[row + pair.second_angle], r.sin[row + pair.second_angle]};
    }
  } else {
#pragma unroll
    for (int b = 0; b < kTurningBatch; ++b) {
      angles.first[b] = angles.second[b] = cos_sin_of_turn(
          fraction_of_turn(positions[pair.axis][rows[b]], turns.of_pair[pair.of_axis]));
    }
  }
  return angles;
}

// kRows rows of a head, rounded, into a [B, T, H, D] view by a warp, 16 bytes a lane.
template <class Element, int kRows, int kWidth>
__device__ __forceinline__ void store_rows(const HeadsView& view, const float (*x)[kWidth],
                                           int64_t batch, int head, int first_row, int num_rows,
                                           int head_dim, int lane) {
  constexpr int kChunks = kWidth / 8 - 1;  // of 8 dims, a row
  constexpr int kRowsTogether = 32 / kChunks;
  const int dim = lane % kChunks * 8, end = min(kRows, num_rows - first_row);
  if (dim >= head_dim) return;
  Element* out =
      static_cast<Element*>(view.data) + batch * view.batch_stride + head * view.head_stride + dim;
#pragma unroll 2
  for (int row = lane / kChunks; row < end; row += kRowsTogether) {
    const float4 a = *reinterpret_cast<const float4*>(&x[row][dim]);
    const float4 b = *reinterpret_cast<const float4*>(&x[row][dim + 4]);
    st_global_v4(out + (first_row + row) * view.token_stride,
                 make_uint4(pack<Element>(a.x, a.y), pack<Element>(a.z, a.w),
                            pack<Element>(b.x, b.y), pack<Element>(b.z, b.w)));
  }
}

// As store_heads() for the 16 rows of a warp, through the rotation. `rows` is the warp's own.
template <class Element, int kCount>
__device__ __forceinline__ void store_turned_back(const HeadsView& view, const float (&x)[kCount],
                                                  float factor, const RotationParams& r,
                                                  const PairTurns& turns,
                                                  TurningRows<2 * kCount>& rows, int64_t batch,
                                                  int head, int first_row, int num_rows,
                                                  int head_dim, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    *reinterpret_cast<float2*>(&rows.x[g + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * t]) =
        make_float2(x[i] * factor, x[i + 1] * factor);
  }
  prepare_positions(rows.positions, r, batch, first_row, num_rows, lane, 32);
  __syncwarp();  // rows are complete
  turn_back<kWarpRows>(rows.x, r, r.rotary_dim / r.axes / 2, lane,
                       [&](const TurningPair& pair, const int (&batch_rows)[kTurningBatch]) {
                         return angles_of_rows(r, turns, rows.positions, batch, head, first_row,
                                               num_rows, pair, batch_rows);
                       });
  __syncwarp();  // and turned
  store_rows<Element, kWarpRows>(view, rows.x, batch, head, first_row, num_rows, head_dim, lane);
}

}  // namespace frx
