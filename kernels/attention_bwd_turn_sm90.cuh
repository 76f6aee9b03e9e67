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

struct Sm90BackwardParams {
  CUtensorMap q_map, k_map, v_map, dout_map;
  AttentionBackwardParams attention;
  PairTurns turns;  // of the side whose gradient the kernel makes
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

// A warp's rows. 8 floats more than D: then neither the accumulators' nor the pairs' order has
// conflicts.
template <int kHeadDim>
struct TurningRows {
  float x[kWarpRows][kHeadDim + 8];
  FixedPosition positions[kMostTurningAxes][kWarpRows];
};

// Positions of the rows from first_row on; unused where tables are given.
template <int kHeadDim>
__device__ __forceinline__ void prepare_positions(TurningRows<kHeadDim>& rows,
                                                  const RotationParams& r, int64_t batch,
                                                  int first_row, int num_rows, int lane) {
  if (r.cos != nullptr) return;
  for (int i = lane; i < r.axes * kWarpRows; i += 32) {
    const int token = min(first_row + i % kWarpRows, num_rows - 1);
    rows.positions[i / kWarpRows][i % kWarpRows] =
        fixed_position_of(r, batch, token, i / kWarpRows);
  }
}

// All rows turned back in place by a warp: a lane has a pair of all of them, or of every other one.
template <int kHeadDim>
__device__ __forceinline__ void turn_back(TurningRows<kHeadDim>& rows, const RotationParams& r,
                                          const PairTurns& turns, int64_t batch, int head,
                                          int first_row, int num_rows, int lane) {
  constexpr int kBatch = 4;  // rows under way at a time: one would be a chain of latencies
  const int pairs = r.rotary_dim / 2, axis_pairs = pairs / r.axes;
  int width = 32;  // lanes side by side in a row
  while (width / 2 >= pairs) width /= 2;
  const int step = 32 / width;
  for (int pair = lane % width; pair < pairs; pair += width) {
    const int axis = pair / axis_pairs;
    const PairDims dims = pair_dims(pair, r.rotary_dim, r.axes, r.interleaved);
    const uint64_t turns_a_position = turns.of_pair[pair - axis * axis_pairs];
    // In a row of the tables
    const int entry = r.full_width ? dims.first : pair;
    const int partner = r.full_width ? dims.second : pair;
    for (int i = lane / width; i < kWarpRows; i += kBatch * step) {
      CosSin first[kBatch], second[kBatch];
      Pair g[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = min(i + b * step, kWarpRows - 1);
        g[b] = {rows.x[row][dims.first], rows.x[row][dims.second]};
        if (r.cos != nullptr) {
          const int64_t start = batch * r.table_batch_stride +
                                min(first_row + row, num_rows - 1) * r.table_token_stride +
                                head * r.table_head_stride;
          first[b] = {r.cos[start + entry], r.sin[start + entry]};
          second[b] = {r.cos[start + partner], r.sin[start + partner]};
        } else {
          first[b] = cos_sin_of_turn(fraction_of_turn(rows.positions[axis][row], turns_a_position));
          second[b] = first[b];
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = i + b * step;
        if (row >= kWarpRows) break;
        const Pair y = rotate_back(g[b], first[b], second[b]);
        rows.x[row][dims.first] = y.first;
        rows.x[row][dims.second] = y.second;
      }
    }
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
  prepare_positions(rows, r, batch, first_row, num_rows, lane);
  __syncwarp();  // rows are complete
  turn_back(rows, r, turns, batch, head, first_row, num_rows, lane);
  __syncwarp();  // and turned

  Element* out =
      static_cast<Element*>(view.data) + batch * view.batch_stride + head * view.head_stride;
  constexpr int kChunks = 2 * kCount / 8;  // of 8 dims, a row
#pragma unroll 4
  for (int i = lane; i < kWarpRows * kChunks; i += 32) {
    const int row = i / kChunks, dim = i % kChunks * 8;
    const float4 a = *reinterpret_cast<const float4*>(&rows.x[row][dim]);
    const float4 b = *reinterpret_cast<const float4*>(&rows.x[row][dim + 4]);
    if (first_row + row < num_rows && dim < head_dim) {
      *reinterpret_cast<uint4*>(out + (first_row + row) * view.token_stride + dim) =
          make_uint4(pack<Element>(a.x, a.y), pack<Element>(a.z, a.w), pack<Element>(b.x, b.y),
                     pack<Element>(b.z, b.w));
    }
  }
}

}  // namespace frx
