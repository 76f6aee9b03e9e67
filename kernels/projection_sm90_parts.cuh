// What the grouped projections' kernel is made of besides its loops: tiles, shared memory, the
// facts of a tile, and its epilogue: bias, rotation, rounding, storing.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "projection_sm90.h"
#include "ptx_sm90.cuh"
#include "softmax_sm90.cuh"  // defines: pack, transpose_quad
#include "storage.cuh"
#include "tf32.h"
#include "tile_sm90.cuh"
#include "transpose_heads_sm90.h"  // defines: padded_tokens
#include "turns.cuh"

namespace frx {

// What TF32 is multiplied from and leaves as.
template <class Element>
using Stored = std::conditional_t<std::is_same_v<Element, Tf32>, float, Element>;

constexpr int kProjectionConsumers = 2;
constexpr int kScribeThreads = 96;  // three warps of warpgroup 0, which write facts of tiles
constexpr int kMaxPairs = 128;      // of a head

enum ProjectionBarrier : int {
  // 0 is __syncthreads
  kTurnsReady = 1,   // the scribes meet once
  kMayMultiply = 2,  // + consumer: the other one has waited for all stages of the tile before
};

template <int kTile>
struct ProjectionConfig {
  static constexpr int kRows = kProjectionTiles[kTile].rows;
  static constexpr int kColumns = kProjectionTiles[kTile].columns;
  static constexpr int kStages = kProjectionTiles[kTile].stages;
  static constexpr int kThreads = kWarpgroup * (1 + kProjectionConsumers);

  static constexpr int kRowBlocks = kRows / 64;       // wgmmas a k step
  static constexpr int kAccumulators = kColumns / 2;  // of a thread, a row block
  // Facts of a consumer's next tile are written down while it finishes the last one, where shared
  // memory has room for both.
  static constexpr int kFactSets = kRows > 128 ? 1 : 2;
  // A lane's second row is turned on from its first, for which 192 rows have no registers.
  static constexpr bool kMovesOn = kRows <= 128;
  static constexpr int kChunks = kColumns / kChunkColumns;
  static constexpr int kUnits = kColumns / kUnitColumns;
  static constexpr uint32_t kRowBytes = kDepthBytes;
  static constexpr uint32_t kXBytes = kRows * kRowBytes;
  static constexpr uint32_t kWeightBytes = kColumns * kRowBytes;

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert((kProducerRegisters + kProjectionConsumers * kConsumerRegisters) * kWarpgroup <=
                65536 / (kThreads * 8) * kThreads * 8);
  static_assert(kXBytes % 1024 == 0 && kWeightBytes % 1024 == 0, "swizzled tiles' alignment");
  static_assert(kChunks <= 32, "a lane a chunk of weights");
};

// Where the rows of the tile are in their sequences: positions axis by axis, or the places of the
// rows in the tables. Of heads that are transposed: where a row's first column is there, and 1 if
// its token exists, else 0.
template <class Config>
struct RowAngles {
  int64_t whole[kMaxPositionAxes * Config::kRows];
  uint32_t fraction[kMaxPositionAxes * Config::kRows];
};

// How the two columns turn that a lane holds together: turns a position and where the axis starts
// in the rows of angles; or the entry of the first column in a row of the tables, negative if
// nothing turns, and how much further that of the second one is.
struct alignas(16) PairAngle {
  int64_t value;
  int32_t offset;
};

// What a consumer's epilogue needs of its tile.
template <class Config>
struct TileFacts {
  RowAngles<Config> rows;
  PairAngle pairs[Config::kChunks][4];    // of lane t of a quad, in each chunk
  CosSin eight_rows[Config::kChunks][4];  // what eight positions turn each pair by
  alignas(8) float bias[Config::kColumns];
  int columns[Config::kChunks];  // where each chunk starts in the result; negative: nowhere
  bool counts;                   // rows are positions that follow each other
};

template <class Config>
struct ProjectionStorage {
  using Depth = unsigned char[kDepthBytes];
  alignas(1024) Depth x[Config::kStages][Config::kRows];
  alignas(1024) Depth weight[Config::kStages][Config::kColumns];
  TileFacts<Config> facts[kProjectionConsumers][Config::kFactSets];
  uint64_t turns[kMaxProjections][kMaxPairs];  // a position, of each pair
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t facts_full[kProjectionConsumers][Config::kFactSets];
  uint64_t facts_empty[kProjectionConsumers][Config::kFactSets];
};

struct ProjectionKernelParams {
  CUtensorMap x_maps[kMaxProjections], weight_maps[kMaxProjections];
  GroupedProjection members[kMaxProjections];
  ProjectionSchedule schedule[kMaxProjections];
  int count;
  int num_tiles;
  TransposedHeads transposed;
};

// ---- transposed heads -------------------------------------------------------------------------

// Where a token's first column is; the next ones are padded_tokens() apart, from head to head as
// well.
__device__ __forceinline__ int64_t transposed_place(const GroupedProjection& p, int64_t batch,
                                                    int token) {
  return batch * p.columns * padded_tokens(p.tokens) + token / 8 * 8 + tf32_depth(token % 8);
}

// The zeros behind every sequence that ends within the tile: a scribe's, so that the epilogue need
// not ask for the end.
template <class Config>
__device__ __forceinline__ void pad_transposed_rows(float* transposed, const GroupedProjection& p,
                                                    int first_row, int first_column, int lane) {
  const int64_t tokens = padded_tokens(p.tokens);
  if (tokens == p.tokens) return;
  const int end = min(first_row + Config::kRows, p.rows);
  const int last_column = min(first_column + Config::kColumns, p.columns);
#pragma unroll 1
  for (int64_t batch = first_row / p.tokens; (batch + 1) * p.tokens <= end; ++batch) {
#pragma unroll 1
    for (int column = first_column + lane; column < last_column; column += 32) {
#pragma unroll 1
      for (int token = p.tokens; token < tokens; ++token) {
        transposed[transposed_place(p, batch, token) + column * tokens] = 0;
      }
    }
  }
}

// ---- angles -----------------------------------------------------------------------------------

// All scribes, once: the frequencies of every member's pairs.
template <class Config>
__device__ __forceinline__ void prepare_turns(const ProjectionKernelParams& params,
                                              ProjectionStorage<Config>& smem, int thread) {
  for (int i = 0; i < params.count; ++i) {
    const RotationParams& r = params.members[i].rotation;
    if (r.rotary_dim == 0 || r.cos != nullptr) continue;
    const int half_width = r.rotary_dim / r.axes / 2;
    for (int pair = thread; pair < r.rotary_dim / 2; pair += kScribeThreads) {
      smem.turns[i][pair] =
          turns_a_position(inverse_frequency(pair % half_width, 2 * half_width, r.log2_base));
    }
  }
}

template <class Config, class Element>
__device__ __forceinline__ void prepare_rows(TileFacts<Config>& facts, const GroupedProjection& p,
                                             const TransposedHeads& transposed, int first_row,
                                             int lane) {
  const RotationParams& r = p.rotation;
  const bool is_transposed = std::is_same_v<Element, Tf32> && p.is_transposed;
  if (r.rotary_dim == 0 && !is_transposed) return;
  facts.counts = r.cos == nullptr && r.positions == nullptr &&
                 first_row % p.tokens + Config::kRows <= p.tokens;
  for (int i = lane; i < Config::kRows; i += 32) {
    const int row = min(first_row + i, p.rows - 1);
    const int batch = row / p.tokens, token = row - batch * p.tokens;
    if (is_transposed) {
      facts.rows.whole[i] = transposed_place(p, batch, token);
      facts.rows.fraction[i] =
          key_exists(transposed.lengths, transposed.keep, batch, token, p.tokens);
    } else if (r.cos != nullptr) {
      facts.rows.whole[i] = batch * r.table_batch_stride + token * r.table_token_stride;
    } else {
      for (int axis = 0; axis < r.axes; ++axis) {
        const FixedPosition position = fixed_position_of(r, batch, token, axis);
        facts.rows.whole[axis * Config::kRows + i] = position.whole;
        facts.rows.fraction[axis * Config::kRows + i] = position.fraction;
      }
    }
  }
}

// Pair `which` of a unit (of the columns in order), in lane t: columns 2t, 2t + 1 of the chunk
// `which` if neighbours turn together, else column 2t + which of both chunks.
template <class Config>
__device__ __forceinline__ PairAngle pair_angle(const GroupedProjection& p, const uint64_t* turns,
                                                int unit, int which, int t) {
  const RotationParams& r = p.rotation;
  const bool gathered = is_gathered(r);
  const ChunkPlace first = chunk_place(p, 2 * unit + (gathered ? 0 : which));
  const int in_chunk = gathered ? 2 * t + which : t, pair = first.pair + in_chunk;
  const bool is_turning = in_chunk < first.num_pairs;
  if (r.cos == nullptr) {
    if (!is_turning) return {0, 0};
    return {static_cast<int64_t>(turns[pair]), pair / (r.rotary_dim / r.axes / 2) * Config::kRows};
  }
  if (!is_turning) return {-1, 0};
  const int64_t start = first.head * r.table_head_stride;
  if (!r.full_width) return {start + pair, 0};
  const int dim = first.column - first.head * p.head_dim + 2 * t + (gathered ? which : 0);
  return {start + dim, gathered ? r.rotary_dim / r.axes / 2 : 1};
}

// What a consumer must know of a tile. The scribes' warps have a part each, since none of them has
// enough to do to hide its latencies.
template <class Config, class Element>
__device__ __forceinline__ void prepare_tile(TileFacts<Config>& facts, const GroupedProjection& p,
                                             const TransposedHeads& transposed,
                                             const uint64_t* turns, int first_row, int first_chunk,
                                             bool shares, int warp, int lane) {
  auto chunk_of_tile = [&](int chunk) {
    chunk += first_chunk;
    return shares ? shared_chunk(p, Config::kChunks, chunk) : chunk;
  };
  if (warp == 0) return prepare_rows<Config, Element>(facts, p, transposed, first_row, lane);
  if (warp == 1) {
    if (std::is_same_v<Element, Tf32> && p.is_transposed) {
      pad_transposed_rows<Config>(transposed.out, p, first_row, first_chunk * kChunkColumns, lane);
    }
    if (p.rotation.rotary_dim == 0) return;
    for (int i = lane; i < 4 * Config::kChunks; i += 32) {
      const int chunk = i / 4;
      const PairAngle pair =
          pair_angle<Config>(p, turns, chunk_of_tile(chunk) / 2, chunk % 2, i % 4);
      facts.pairs[chunk][i % 4] = pair;
      facts.eight_rows[chunk][i % 4] =
          cos_sin_of_turn(fraction_of_turn({8, 0}, static_cast<uint64_t>(pair.value)));
    }
    return;
  }
  if (lane < Config::kChunks) {
    const int column = chunk_column(p, chunk_of_tile(lane));
    facts.columns[lane] = column < p.columns ? column : -1;
  }
  if (p.bias == nullptr) return;
  for (int i = lane; i < Config::kColumns; i += 32) {
    const int column = chunk_column(p, chunk_of_tile(i / kChunkColumns)) + i % kChunkColumns;
    facts.bias[i] =
        column < p.columns ? to_float(static_cast<const Stored<Element>*>(p.bias)[column]) : 0.f;
  }
}

// ---- epilogue ---------------------------------------------------------------------------------

// A lane has two pairs of columns in each unit. A pair that does not turn has the angle 0.
constexpr int kPairs = 2;

struct PositionAngles {
  static constexpr bool kTurns = true, kMovesOn = true;
  using Turn = CosSin;
  uint64_t turns[kPairs];
  uint32_t offsets;  // 16 bits each

  // pairs: of the unit's first chunk, in this lane
  __device__ __forceinline__ PositionAngles(const GroupedProjection&, const PairAngle* pairs)
      : turns{static_cast<uint64_t>(pairs[0].value), static_cast<uint64_t>(pairs[4].value)},
        offsets(pairs[0].offset | pairs[4].offset << 16) {}

  template <class Rows>
  __device__ __forceinline__ void find(Turn (&turn)[kPairs], const PairAngle*, const Rows& rows,
                                       int row) const {
    const int first = row + (offsets & 0xffff), second = row + (offsets >> 16);
    FixedPosition at{rows.whole[first], rows.fraction[first]};
    turn[0] = cos_sin_of_turn(fraction_of_turn(at, turns[0]));
    if (second != first) at = {rows.whole[second], rows.fraction[second]};
    turn[1] = cos_sin_of_turn(fraction_of_turn(at, turns[1]));
  }

  // Eight positions further on: within 4e-7 of the exact values.
  static __device__ __forceinline__ void move_on(Turn (&turn)[kPairs], const CosSin* eight_rows) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const CosSin by = eight_rows[4 * i];
      const Pair turned = rotate({turn[i].cos, turn[i].sin}, by.cos, by.sin);
      turn[i] = {turned.first, turned.second};
    }
  }

  static __device__ __forceinline__ Pair apply(const Turn& turn, Pair x) {
    return rotate(x, turn.cos, turn.sin);
  }
};

struct TableAngles {
  static constexpr bool kTurns = true, kMovesOn = false;
  struct Turn {
    CosSin first, second;
  };
  const float *cos, *sin;

  __device__ __forceinline__ TableAngles(const GroupedProjection& p, const PairAngle*)
      : cos(p.rotation.cos), sin(p.rotation.sin) {}

  template <class Rows>
  __device__ __forceinline__ void find(Turn (&turn)[kPairs], const PairAngle* pairs,
                                       const Rows& rows, int row) const {
    const int64_t start = rows.whole[row];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const PairAngle pair = pairs[4 * i];
      turn[i] = {{1.f, 0.f}, {1.f, 0.f}};
      if (pair.value < 0) continue;
      const int64_t entry = start + pair.value;
      turn[i].first = turn[i].second = {cos[entry], sin[entry]};
      if (pair.offset != 0) turn[i].second = {cos[entry + pair.offset], sin[entry + pair.offset]};
    }
  }

  static __device__ __forceinline__ void move_on(Turn (&)[kPairs], const CosSin*) {}

  static __device__ __forceinline__ Pair apply(const Turn& turn, Pair x) {
    return rotate(x, turn.first, turn.second);
  }
};

struct NoAngles {
  static constexpr bool kTurns = false, kMovesOn = false;
  struct Turn {};
  __device__ __forceinline__ NoAngles(const GroupedProjection&, const PairAngle*) {}
  template <class Rows>
  __device__ __forceinline__ void find(Turn (&)[kPairs], const PairAngle*, const Rows&, int) const {
  }
  static __device__ __forceinline__ void move_on(Turn (&)[kPairs], const CosSin*) {}
  static __device__ __forceinline__ Pair apply(const Turn&, Pair x) { return x; }
};

// Two columns of each of a unit's chunks a and b. (a[0], a[1]) and (b[0], b[1]) turn together where
// neighbours do, else (a[0], b[0]) and (a[1], b[1]).
template <class Source, bool kIsGathered>
__device__ __forceinline__ void rotate_unit(float (&a)[2], float (&b)[2],
                                            const typename Source::Turn (&turn)[kPairs]) {
  float &x = kIsGathered ? b[0] : a[1], &y = kIsGathered ? a[1] : b[0];
  const Pair first = Source::apply(turn[0], {a[0], x}), second = Source::apply(turn[1], {y, b[1]});
  a[0] = first.first;
  x = first.second;
  y = second.first;
  b[1] = second.second;
}

template <class Config>
__device__ __forceinline__ void add_bias(
    float (&accumulators)[Config::kRowBlocks][Config::kAccumulators],
    const TileFacts<Config>& facts, int t) {
#pragma unroll
  for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
    const float2 bias =
        *reinterpret_cast<const float2*>(&facts.bias[chunk * kChunkColumns + 2 * t]);
#pragma unroll
    for (int m = 0; m < Config::kRowBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        accumulators[m][4 * chunk + i] += bias.x;
        accumulators[m][4 * chunk + i + 1] += bias.y;
      }
    }
  }
}

// Two columns of a chunk; a quad writes 32 bytes together.
__device__ __forceinline__ void store_pair(float* out, int row, int rows_left, int columns,
                                           int column, int t, const float (&x)[2]) {
  if (row >= rows_left || column < 0) return;
  st_global_v2(out + static_cast<int64_t>(row) * columns + column + 2 * t, make_float2(x[0], x[1]));
}

// How the epilogue walks through a tile: in steps of a few units of each of kParts parts, in which
// angles are the same. Its code expects a step's accumulators in the first places of each part.
template <class Config, class Source_, int kParts_, int kMostUnits, bool kIsGathered_>
struct Finish {
  using Source = Source_;
  static constexpr int kParts = kParts_;
  static constexpr bool kIsGathered = kIsGathered_;
  static constexpr int kPartUnits = Config::kUnits / kParts;
  static constexpr int kStepUnits = kMostUnits < kPartUnits ? kMostUnits : kPartUnits;
  static constexpr int kRowSteps = kPartUnits / kStepUnits;  // of a row block
  static constexpr int kSteps = Config::kRowBlocks * kRowSteps;
  static constexpr int kUnitAccumulators = kUnitColumns / 2;

  // Moves all accumulators behind the first step's up by a step, from row block to row block.
  static __device__ __forceinline__ void advance(
      float (&accumulators)[Config::kRowBlocks][Config::kAccumulators]) {
    constexpr int kPart = kPartUnits * kUnitAccumulators, kStep = kStepUnits * kUnitAccumulators;
#pragma unroll
    for (int i = 0; i + kStep < Config::kRowBlocks * kPart; ++i) {
      const int from = i + kStep;
#pragma unroll
      for (int part = 0; part < kParts * kPart; part += kPart) {
        accumulators[i / kPart][part + i % kPart] = accumulators[from / kPart][part + from % kPart];
      }
    }
  }
};

// What a lane has of a row in a step, in the transposed result, of which eight lanes write 32 bytes
// of a row together. x: its first accumulator.
template <class Finish, class Config>
__device__ __forceinline__ void store_transposed(float* out, const GroupedProjection& p,
                                                 const TileFacts<Config>& facts, int row,
                                                 const float* x, int first_unit, int t) {
  const int64_t width = padded_tokens(p.tokens);
  out += facts.rows.whole[row] + (facts.columns[2 * first_unit] + 2 * t) * width;
  const bool exists = facts.rows.fraction[row] != 0;
#pragma unroll
  for (int chunk = 0; chunk < 2 * Finish::kStepUnits; ++chunk) {
    if (facts.columns[2 * first_unit + chunk] >= 0) {
      out[0] = exists ? x[4 * chunk] : 0.f;
      out[width] = exists ? x[4 * chunk + 1] : 0.f;
    }
    out += kChunkColumns * width;
  }
}

// Rotation, rounding and storing of a warpgroup's tile. A loop, although accumulators must be moved
// for it: unrolled, the code would come from L2 for every tile, which takes longer than to run it.
template <class Finish, class Element, class Config>
__device__ __forceinline__ void finish_tile(
    float (&accumulators)[Config::kRowBlocks][Config::kAccumulators], const GroupedProjection& p,
    const TileFacts<Config>& facts, int first_row, int thread, float* transposed = nullptr) {
  using Source = typename Finish::Source;
  constexpr int kStepUnits = Finish::kStepUnits, kUnits = kStepUnits * Finish::kParts;
  const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  // Of the thread's first row
  const int thread_row = first_row + 16 * warp + g, rows_left = p.rows - thread_row;
  const int columns = p.columns;
  Stored<Element>* const out =
      static_cast<Stored<Element>*>(p.out) + static_cast<int64_t>(thread_row) * columns;
#pragma unroll 1
  for (int step = 0; step < Finish::kSteps; ++step) {
    const int m = step / Finish::kRowSteps,
              first_unit = (step - m * Finish::kRowSteps) * kStepUnits;
    // Where the i-th of the step's units is in the tile
    auto place = [&](int i) {
      return i / kStepUnits * Finish::kPartUnits + first_unit + i % kStepUnits;
    };
    typename Source::Turn turns[kStepUnits][kPairs];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 64 * m + 8 * half;  // from the thread's first one
      uint32_t words[kUnits][2];
#pragma unroll
      for (int u = 0; u < kStepUnits; ++u) {
        const PairAngle* const pairs = &facts.pairs[2 * (first_unit + u)][t];
        auto& turn = turns[u];
        if (Source::kMovesOn && Config::kMovesOn && half > 0 && facts.counts) {
          Source::move_on(turn, &facts.eight_rows[2 * (first_unit + u)][t]);
        } else {
          Source(p, pairs).find(turn, pairs, facts.rows, 16 * warp + g + row);
        }
#pragma unroll
        for (int part = 0; part < Finish::kParts; ++part) {
          const int i = part * kStepUnits + u;
          const float* const x =
              &accumulators[0]
                           [(part * Finish::kPartUnits + u) * Finish::kUnitAccumulators + 2 * half];
          float a[2] = {x[0], x[1]}, b[2] = {x[4], x[5]};
          if constexpr (Source::kTurns) rotate_unit<Source, Finish::kIsGathered>(a, b, turn);
          if constexpr (std::is_same_v<Element, Tf32>) {
            store_pair(out, row, rows_left, columns, facts.columns[2 * place(i)], t, a);
            store_pair(out, row, rows_left, columns, facts.columns[2 * place(i) + 1], t, b);
          } else {
            words[i][0] = pack<Element>(a[0], a[1]);
            words[i][1] = pack<Element>(b[0], b[1]);
          }
        }
      }
      if constexpr (std::is_same_v<Element, Tf32> && !Source::kTurns) {
        if (p.is_transposed && row < rows_left) {
          store_transposed<Finish>(transposed, p, facts, 16 * warp + g + row,
                                   accumulators[0] + 2 * half, first_unit, t);
        }
      }
      if constexpr (!std::is_same_v<Element, Tf32>) {
#pragma unroll
        for (int i = 0; i < kUnits; i += 2) {
          const uint32_t four[4] = {words[i][0], words[i][1], words[i + 1][0], words[i + 1][1]};
          const uint4 eight = transpose_quad(four, t);
          const int column = facts.columns[2 * place(i + t / 2) + t % 2];
          if (row < rows_left && column >= 0) {
            *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * columns + column) = eight;
          }
        }
      }
    }
    Finish::advance(accumulators);
  }
}

template <class Config, class Element, class Source>
__device__ __forceinline__ void finish_turning_tile(
    float (&accumulators)[Config::kRowBlocks][Config::kAccumulators], const GroupedProjection& p,
    const TileFacts<Config>& facts, bool shares, int first_row, int thread) {
  const bool gathered = is_gathered(p.rotation);
  if constexpr (Config::kUnits >= kSharingHeads) {
    constexpr int kHeads = kSharingHeads;
    if (shares && gathered) {
      return finish_tile<Finish<Config, Source, kHeads, 1, true>, Element>(accumulators, p, facts,
                                                                           first_row, thread);
    }
    if (shares) {
      return finish_tile<Finish<Config, Source, kHeads, 1, false>, Element>(accumulators, p, facts,
                                                                            first_row, thread);
    }
  }
  if (gathered) {
    finish_tile<Finish<Config, Source, 1, 2, true>, Element>(accumulators, p, facts, first_row,
                                                             thread);
  } else {
    finish_tile<Finish<Config, Source, 1, 2, false>, Element>(accumulators, p, facts, first_row,
                                                              thread);
  }
}

template <class Config, class Element>
__device__ __forceinline__ void finish_tile(
    float (&accumulators)[Config::kRowBlocks][Config::kAccumulators], const GroupedProjection& p,
    const TileFacts<Config>& facts, float* transposed, bool shares, int first_row, int thread) {
  if (p.bias != nullptr) add_bias<Config>(accumulators, facts, thread % 4);
  if (p.rotation.rotary_dim == 0) {
    return finish_tile<Finish<Config, NoAngles, 1, 4, false>, Element>(
        accumulators, p, facts, first_row, thread, transposed);
  }
  if (p.rotation.cos != nullptr) {
    return finish_turning_tile<Config, Element, TableAngles>(accumulators, p, facts, shares,
                                                             first_row, thread);
  }
  finish_turning_tile<Config, Element, PositionAngles>(accumulators, p, facts, shares, first_row,
                                                       thread);
}

}  // namespace frx
