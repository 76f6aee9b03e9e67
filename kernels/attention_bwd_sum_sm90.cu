// Sums of parts: dq, and dk and dv of blocks of keys that were cut (key_pieces.h). Scales, turns
// back what was rotated, rounds once, and undoes the parts' fragment order.
//
// A strip is 16 rows of a head of one of the three, a band the strips of the same tokens: dq of all
// heads, or dk and dv of one. A block takes strips that follow each other, band by band, and puts
// the angles that they share into shared memory before it waits for the parts. Then two warps a
// strip each sum half of its dims, meet, and each turn, round and store half of its rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attention_bwd_turn_sm90.cuh"
#include "attention_sm90.h"
#include "chained_launch.cuh"
#include "device.h"
#include "divisor.h"

namespace frx {

namespace {

constexpr int kStrips = 4;  // under way at a time in a block
constexpr int kStripWarps = 2;
constexpr int kStripThreads = 32 * kStripWarps;
constexpr int kThreads = kStripThreads * kStrips;
constexpr int kRowsPerWarp = kWarpRows / kStripWarps;
constexpr int kFirstStripBarrier = 1;  // + strip: its warps meet; 0 is __syncthreads

enum Side : int { kKeySide, kQuerySide, kSides };

// What is chosen by index at run time, so that there is one copy of the code. A group is the rows
// that bands cut: those of a batch element, or of a head of keys, whole tiles.
struct SummedSide {
  RotationParams rotation;
  PairTurns turns;
  int64_t part_floats;           // from a strip's part to its next
  int32_t strips, block_strips;  // in all, and of a block
  Divisor band_strips;           // strips of a band
  Divisor group_bands;           // bands of a group
  Divisor batch_groups;          // groups of a batch element
  Divisor table_strips;          // strips that share their angles: a band, unless heads have tables
  Divisor axis_pairs;
  Divisor table_width;  // angles of a row
  int32_t first_band;   // of those that have parts
  int32_t num_rows;
};

struct SummedTensor {
  HeadsView out;
  float factor;
  bool turns;
};

struct SumParams {
  AttentionBackwardParams attention;
  SummedSide sides[kSides];
  SummedTensor tensors[kKeyGradients + 1];  // dq behind dk and dv
  KeyShares key_shares;
  int32_t key_blocks;      // of the grid, the first ones: theirs are the most parts
  int32_t first_gradient;  // of keys that have parts
};

// A block's shared memory, behind which lie the angles of its strips.
template <int kHeadDim>
struct StripRows {
  TurningRow<kHeadDim> x[kStrips][kWarpRows];
};

// What angles are made of; in the place of rows, which come later.
template <int kHeadDim>
struct AngleInputs {
  StripPositions positions[kStrips];
  uint64_t turns[kHeadDim / 2];  // of the pairs of an axis, where lanes read them side by side
};
static_assert(sizeof(AngleInputs<256>) <= sizeof(StripRows<256>));
static_assert(sizeof(AngleInputs<32>) <= sizeof(StripRows<32>));

// ---- where things are -------------------------------------------------------------------------

struct Strip {
  int band, within;  // its number in the band
  int batch, head;
  int first_row;
};

__device__ __forceinline__ int remainder(int dividend, int quotient, const Divisor& d) {
  return dividend - quotient * static_cast<int>(d.value);
}

__device__ __forceinline__ Strip locate_strip(const SummedSide& side, bool of_queries, int index) {
  Strip strip;
  strip.band = quotient(index, side.band_strips);
  strip.within = remainder(index, strip.band, side.band_strips);
  const int band = side.first_band + strip.band, group = quotient(band, side.group_bands);
  strip.first_row = remainder(band, group, side.group_bands) * kWarpRows;
  strip.batch = quotient(group, side.batch_groups);
  strip.head = of_queries ? strip.within : remainder(group, strip.batch, side.batch_groups);
  return strip;
}

struct StripParts {
  const float* first;  // the lane's first piece
  int count;
};

template <int kHeadDim>
__device__ __forceinline__ StripParts locate_parts(const SumParams& params, bool of_queries,
                                                   const Strip& strip, int lane) {
  const AttentionBackwardParams& p = params.attention;
  if (of_queries) {
    const int64_t batch_head = static_cast<int64_t>(strip.batch) * p.sizes.num_heads + strip.head;
    return {dq_fragments<kHeadDim>(p, 0, batch_head, strip.first_row, lane), p.num_splits};
  }
  const IndexRange parts = parts_of_block(params.key_shares, strip.band / kConsumerWarps);
  return {dkv_fragments<kHeadDim>(p, parts.begin, params.first_gradient + strip.within,
                                  strip.band % kConsumerWarps, lane),
          parts.end - parts.begin};
}

// ---- angles -----------------------------------------------------------------------------------

// Tables that a block keeps: of its strips from `first` on.
struct BlockTables {
  int first, count;
};

__device__ __forceinline__ BlockTables locate_tables(const SummedSide& side, int first_strip,
                                                     int end_strip) {
  const int first = quotient(first_strip, side.table_strips);
  return {first, quotient(end_strip - 1, side.table_strips) - first + 1};
}

// From the tables that were given. Two loads under way are enough for what nobody waits for.
__device__ __forceinline__ void copy_angles(CosSin* angles, const SummedSide& side,
                                            const Strip& strip) {
  const RotationParams& r = side.rotation;
  const int64_t start = strip.batch * r.table_batch_stride + strip.head * r.table_head_stride;
#pragma unroll 1
  for (int i = threadIdx.x; i < kWarpRows * static_cast<int>(side.table_width.value);
       i += kThreads) {
    const int row = quotient(i, side.table_width), angle = remainder(i, row, side.table_width);
    const int token = min(strip.first_row + row, side.num_rows - 1);
    const int64_t at = start + token * r.table_token_stride + angle;
    angles[i] = {r.cos[at], r.sin[at]};
  }
}

template <int kHeadDim>
__device__ __forceinline__ void make_angles(CosSin* angles, const AngleInputs<kHeadDim>& inputs,
                                            const SummedSide& side, int count) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int row = quotient(i, side.table_width), pair = remainder(i, row, side.table_width);
    const int axis = quotient(pair, side.axis_pairs);
    angles[i] =
        cos_sin_of_turn(fraction_of_turn(inputs.positions[row / kWarpRows][axis][row % kWarpRows],
                                         inputs.turns[remainder(pair, axis, side.axis_pairs)]));
  }
}

// [tables][16 rows][table width]. Reads what no kernel of the chain writes.
template <int kHeadDim>
__device__ __forceinline__ void prepare_angles(CosSin* angles, AngleInputs<kHeadDim>& inputs,
                                               const SummedSide& side, bool of_queries,
                                               const BlockTables& tables) {
  const RotationParams& r = side.rotation;
  if (r.rotary_dim == 0) return;
  const int thread = threadIdx.x, width = static_cast<int>(side.table_width.value);
#pragma unroll 1
  for (int table = 0; table < tables.count; ++table) {
    const int first_strip = (tables.first + table) * static_cast<int>(side.table_strips.value);
    const Strip strip = locate_strip(side, of_queries, first_strip);
    if (r.cos != nullptr) {
      copy_angles(angles + table * kWarpRows * width, side, strip);
    } else {
      prepare_positions(inputs.positions[table], r, strip.batch, strip.first_row, side.num_rows,
                        thread, kThreads);
    }
  }
  if (r.cos != nullptr) return;
  if (thread < static_cast<int>(side.axis_pairs.value)) {
    inputs.turns[thread] = side.turns.of_pair[thread];
  }
  __syncthreads();  // positions and turns are there
  make_angles(angles, inputs, side, tables.count * kWarpRows * width);
}

// ---- sums -------------------------------------------------------------------------------------

template <int kPieces>
struct Fragments {
  float4 x[kPieces];

  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      x[n] = *reinterpret_cast<const float4*>(from + n * kFragment);
    }
  }
  __device__ __forceinline__ void add(const Fragments& part) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      x[n].x += part.x[n].x;
      x[n].y += part.x[n].y;
      x[n].z += part.x[n].z;
      x[n].w += part.x[n].w;
    }
  }
};

// In the parts' order, with two of them under way.
template <int kPieces>
__device__ __forceinline__ Fragments<kPieces> sum_fragments(const float* part, int64_t part_floats,
                                                            int num_parts) {
  Fragments<kPieces> sum = {}, first, second;
#pragma unroll 1
  for (; num_parts > 1; num_parts -= 2, part += 2 * part_floats) {
    first.load(part);
    second.load(part + part_floats);
    sum.add(first);
    sum.add(second);
  }
  if (num_parts > 0) {
    first.load(part);
    sum.add(first);
  }
  return sum;
}

// Half of a strip's dims, scaled, into x.
template <int kHeadDim>
__device__ __forceinline__ void sum_parts(TurningRow<kHeadDim>* x, const StripParts& parts,
                                          int64_t part_floats, float factor, int half, int lane) {
  constexpr int kHalf = kHeadDim / 8 / kStripWarps;  // pieces, of 8 dims
  // At a time: registers hold three times as many
  constexpr int kMostPieces = kHeadDim <= 128 ? 4 : 8;
  constexpr int kPieces = kHalf < kMostPieces ? kHalf : kMostPieces;
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int piece = half * kHalf; piece < (half + 1) * kHalf; piece += kPieces) {
    const Fragments<kPieces> sum =
        sum_fragments<kPieces>(parts.first + piece * kFragment, part_floats, parts.count);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int dim = 8 * (piece + n) + 2 * t;
      const float4 y = sum.x[n];
      *reinterpret_cast<float2*>(&x[g][dim]) = make_float2(y.x * factor, y.y * factor);
      *reinterpret_cast<float2*>(&x[g + 8][dim]) = make_float2(y.z * factor, y.w * factor);
    }
  }
}

// A warp's rows, whose angles start at that row of the block's tables.
template <int kHeadDim>
__device__ __forceinline__ void turn_rows(TurningRow<kHeadDim>* x, const SummedSide& side,
                                          const CosSin* angles, int table_row, int lane) {
  const RotationParams& r = side.rotation;
  const int width = static_cast<int>(side.table_width.value);
  angles += table_row * width;
  turn_back<kRowsPerWarp>(x, r, static_cast<int>(side.axis_pairs.value), lane,
                          [&](const TurningPair& pair, const int (&rows)[kTurningBatch]) {
                            TurningAngles of_rows;
#pragma unroll
                            for (int b = 0; b < kTurningBatch; ++b) {
                              const CosSin* row = angles + rows[b] * width;
                              of_rows.first[b] = row[pair.first_angle];
                              of_rows.second[b] =
                                  r.full_width ? row[pair.second_angle] : of_rows.first[b];
                            }
                            return of_rows;
                          });
}

template <int kHeadDim, class Element>
__global__ __launch_bounds__(kThreads, kHeadDim <= 128 ? 4 : 2) void sum_parts_kernel(
    const __grid_constant__ SumParams params) {
  extern __shared__ __align__(16) unsigned char smem[];
  auto& strips = *reinterpret_cast<StripRows<kHeadDim>*>(smem);
  auto* angles = reinterpret_cast<CosSin*>(smem + sizeof(strips));
  const int block = blockIdx.x;
  const bool of_queries = block >= params.key_blocks;
  const SummedSide& side = params.sides[of_queries ? kQuerySide : kKeySide];
  const int first_strip = (block - (of_queries ? params.key_blocks : 0)) * side.block_strips;
  const int end_strip = min(first_strip + side.block_strips, side.strips);
  const int slot = threadIdx.x / kStripThreads, half = threadIdx.x / 32 % kStripWarps;
  const int lane = threadIdx.x % 32;

  // What no kernel of the chain writes
  const BlockTables tables = locate_tables(side, first_strip, end_strip);
  prepare_angles(angles, *reinterpret_cast<AngleInputs<kHeadDim>*>(smem), side, of_queries, tables);
  __syncthreads();  // angles are there

  TurningRow<kHeadDim>* x = strips.x[slot];
#pragma unroll 1
  for (int index = first_strip + slot; index < end_strip; index += kStrips) {
    const Strip strip = locate_strip(side, of_queries, index);
    const StripParts parts = locate_parts<kHeadDim>(params, of_queries, strip, lane);
    const SummedTensor& tensor =
        params.tensors[of_queries ? kKeyGradients : params.first_gradient + strip.within];
    wait_for_previous_kernel();  // at once from the second strip on
    let_next_kernel_start();
    sum_parts<kHeadDim>(x, parts, side.part_floats, tensor.factor, half, lane);
    named_barrier_sync(kFirstStripBarrier + slot, kStripThreads);  // rows are complete
    TurningRow<kHeadDim>* own = x + half * kRowsPerWarp;
    if (tensor.turns) {
      const int table = quotient(index, side.table_strips) - tables.first;
      turn_rows<kHeadDim>(own, side, angles, table * kWarpRows + half * kRowsPerWarp, lane);
      __syncwarp();  // rows are turned
    }
    store_rows<Element, kRowsPerWarp>(tensor.out, own, strip.batch, strip.head,
                                      strip.first_row + half * kRowsPerWarp, side.num_rows,
                                      params.attention.sizes.head_dim, lane);
    named_barrier_sync(kFirstStripBarrier + slot, kStripThreads);  // and may be overwritten
  }
}

// ---- launch -----------------------------------------------------------------------------------

// A block's angles serve more strips where that leaves eight blocks a multiprocessor, at least
// twice what run at once.
int strips_a_block(const SummedSide& side) {
  const bool is_whole = side.table_strips.value % (2 * kStrips) == 0;
  const int64_t many = int64_t{8} * current_gpu().num_sms * 2 * kStrips;
  return is_whole && side.strips >= many ? 2 * kStrips : kStrips;
}

template <int kHeadDim>
SumParams plan_sum(const AttentionBackwardParams& p, const CutKeys& cut) {
  const AttentionSizes& s = p.sizes;
  SumParams params = {p};
  SummedSide& keys = params.sides[kKeySide];
  SummedSide& queries = params.sides[kQuerySide];
  keys.num_rows = s.num_keys;
  const int key_gradients = kKeyGradients - first_part_gradient(p);
  params.first_gradient = first_part_gradient(p);
  keys.band_strips = make_divisor(key_gradients);
  keys.group_bands = make_divisor(ceil_div(s.num_keys, kTileRows) * kConsumerWarps);
  keys.batch_groups = make_divisor(s.num_kv_heads);
  if (p.dkv_parts != nullptr) {
    if (first_part_gradient(p) == kKeyGradientDk) keys.rotation = p.k_rotation;
    keys.part_floats = dkv_fragments<kHeadDim>(p, 1, kKeyGradientDv, 0, 0) -
                       dkv_fragments<kHeadDim>(p, 0, kKeyGradientDv, 0, 0);
    params.key_shares = cut.shares;
    keys.first_band = cut.blocks.begin * kConsumerWarps;
    keys.strips = (cut.blocks.end - cut.blocks.begin) * kConsumerWarps * key_gradients;
  }
  const int query_bands = ceil_div(s.num_queries, kWarpRows);
  queries.num_rows = s.num_queries;
  queries.band_strips = make_divisor(s.num_heads);
  queries.group_bands = make_divisor(query_bands);
  queries.batch_groups = make_divisor(1);
  if (p.dq_parts != nullptr) {
    queries.rotation = p.q_rotation;
    queries.part_floats =
        dq_fragments<kHeadDim>(p, 1, 0, 0, 0) - dq_fragments<kHeadDim>(p, 0, 0, 0, 0);
    queries.strips = static_cast<int32_t>(s.batch) * query_bands * s.num_heads;
  }
  for (SummedSide& side : params.sides) {
    RotationParams& r = side.rotation;
    r.full_width = r.full_width && r.cos != nullptr;
    const bool heads_differ = r.cos != nullptr && r.table_head_stride != 0;
    side.turns = plan_turns(r);
    side.table_strips = heads_differ ? make_divisor(1) : side.band_strips;
    side.block_strips = strips_a_block(side);
    side.axis_pairs = make_divisor(r.axes > 0 ? r.rotary_dim / r.axes / 2 : 0);
    side.table_width = make_divisor(r.full_width ? r.rotary_dim : r.rotary_dim / 2);
  }
  const bool turns_keys = keys.rotation.rotary_dim > 0;
  params.tensors[kKeyGradientDk] = {p.dk, p.scores.scale, turns_keys};
  params.tensors[kKeyGradientDv] = {p.dv, p.scores.seed != nullptr ? p.scores.keep_scale : 1.f,
                                    false};
  params.tensors[kKeyGradients] = {p.dq, p.scores.scale, queries.rotation.rotary_dim > 0};
  params.key_blocks = ceil_div(keys.strips, keys.block_strips);
  return params;
}

// At most, in a block.
size_t table_bytes(const SummedSide& side) {
  if (side.strips == 0 || side.rotation.rotary_dim == 0) return 0;
  const int each = static_cast<int>(side.table_strips.value), strips = side.block_strips;
  const int tables = each % strips == 0 ? 1 : strips % each == 0 ? strips / each : 2;
  return tables * kWarpRows * side.table_width.value * sizeof(CosSin);
}

template <int kHeadDim>
void launch_sum(const AttentionBackwardParams& p, const CutKeys& cut, cudaStream_t stream) {
  const SumParams params = plan_sum<kHeadDim>(p, cut);
  const SummedSide &keys = params.sides[kKeySide], &queries = params.sides[kQuerySide];
  const size_t smem_bytes =
      sizeof(StripRows<kHeadDim>) + std::max(table_bytes(keys), table_bytes(queries));
  launch_chained(p.dtype == DType::kBFloat16 ? sum_parts_kernel<kHeadDim, __nv_bfloat16>
                                             : sum_parts_kernel<kHeadDim, __half>,
                 "attention_backward_sum_sm90",
                 params.key_blocks + ceil_div(queries.strips, queries.block_strips), kThreads,
                 smem_bytes, stream, params);
}

}  // namespace

void attention_backward_sm90_sum(const AttentionBackwardParams& p, const CutKeys& cut,
                                 cudaStream_t stream) {
  if (p.sizes.head_dim <= 32) return launch_sum<32>(p, cut, stream);
  if (p.sizes.head_dim <= 64) return launch_sum<64>(p, cut, stream);
  if (p.sizes.head_dim <= 128) return launch_sum<128>(p, cut, stream);
  launch_sum<256>(p, cut, stream);
}

}  // namespace frx
