// What one lane of norm_rope's kernels holds, and the steps on it: loads and stores, angles,
// rotation. The layout is in norm_rope_plan.h.
#pragma once

#include <type_traits>

#include "norm_rope_plan.h"
#include "positions.cuh"
#include "storage.cuh"

namespace frx::norm_rope {

// What one lane holds of one head, as fp32: kUnits units of two vectors.
template <int kVec>
struct HeadPart {
  static constexpr int kUnits = kUnitsPerLane<kVec>;
  float v[kUnits][2][kVec];
};

// The same as it came from memory. Conversion waits until use, so that loads stay in flight.
template <class T, int kVec>
struct RawPart {
  Packed<typename Storage<T>::Register, kVec> v[kUnitsPerLane<kVec>][2];
};

template <int kVec>
struct Angles {
  HeadPart<kVec> cos, sin;
};

// A head of a token, as one lane sees it.
struct Row {
  bool is_active;  // false for lanes past the tile's end, which only join in shuffles
  int token;       // within the tile
  int head;
  int64_t start;  // element at which the head starts in x, grad and out
};

struct Tile {
  int64_t first_token;  // in [0, B * T)
  int64_t batch;        // the first token's place in [B, T]
  uint32_t position;
  int num_tokens;
  int num_lanes;  // num_tokens * lanes_per_token
};

// A token's place in [B, T].
struct TokenPlace {
  int64_t batch;
  int64_t position;
};

struct SharedMemory {
  float* scratch;       // [3, warps]
  double* frequencies;  // [R / 2]
  float* angles;        // [2, tokens_per_tile, D]
  float* accumulated;   // [2, H * D]

  __device__ __forceinline__ SharedMemory(unsigned char* base, const SmemOffsets& offsets)
      : scratch(reinterpret_cast<float*>(base)),
        frequencies(reinterpret_cast<double*>(base + offsets.frequencies)),
        angles(reinterpret_cast<float*>(base + offsets.angles)),
        accumulated(reinterpret_cast<float*>(base + offsets.accumulated)) {}
};

// One lane's constant share of the work and the steps on it.
template <int kVec>
struct Worker {
  static constexpr int kUnits = kUnitsPerLane<kVec>;
  using Part = HeadPart<kVec>;

  const NormRopeParams& p;
  const Geometry& g;
  SharedMemory shared;
  UnitPlace place[kUnits];
  bool has[kUnits][2];  // false beyond the head's last dim

  __device__ __forceinline__ Worker(const Launch& launch, unsigned char* smem)
      : p(launch.params), g(launch.geometry), shared(smem, launch.geometry.smem) {
    // lanes_per_head divides the warp and hence every step of the item loop: the place is constant.
    const int lane_in_head = threadIdx.x & (g.lanes_per_head - 1);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = lane_in_head + k * g.lanes_per_head;
      place[k] = place_of_unit<kVec>(unit, p.head_dim, p.rotary_dim, rotary_axes(), p.interleaved);
      has[k][0] = unit < g.units_per_head;
      has[k][1] = has[k][0] && (kVec > 1 || place[k].dim[1] < p.head_dim);
    }
  }

  __device__ __forceinline__ int rotary_axes() const { return p.rotary_dim > 0 ? p.axes : 1; }

  // Calls f(k, v) for the vectors that this lane holds.
  template <class F>
  __device__ __forceinline__ void for_each_vector(F f) const {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        if (has[k][v]) f(k, v);
      }
    }
  }

  __device__ __forceinline__ Tile tile_at(int64_t index) const {
    const int64_t first = index * g.tokens_per_tile;
    const int64_t rest = g.num_tokens - first;
    const int count = rest < g.tokens_per_tile ? static_cast<int>(rest) : g.tokens_per_tile;
    const int64_t batch = first / p.num_tokens;
    const uint32_t position = static_cast<uint32_t>(first - batch * p.num_tokens);
    return {first, batch, position, count, count * g.lanes_per_token};
  }

  // One 64-bit division a tile, 32-bit ones here.
  __device__ __forceinline__ TokenPlace place_of_token(const Tile& tile, int token) const {
    const uint32_t num_tokens = static_cast<uint32_t>(p.num_tokens);
    const uint32_t position = tile.position + token, batches = position / num_tokens;
    return {tile.batch + batches, static_cast<int64_t>(position - batches * num_tokens)};
  }

  // The row of this thread in pass `first_lane`, a multiple of the block's size.
  __device__ __forceinline__ Row row_at(const Tile& tile, int first_lane) const {
    const int item = first_lane + static_cast<int>(threadIdx.x);
    if (item >= tile.num_lanes) return {false, 0, 0, 0};
    const int token = static_cast<uint32_t>(item) / static_cast<uint32_t>(g.lanes_per_token);
    const int head = (item - token * g.lanes_per_token) >> g.lanes_per_head_log2;
    return {true, token, head, ((tile.first_token + token) * p.num_heads + head) * p.head_dim};
  }

  // Calls f(row) or f(row, next row) for every pass in which this warp has at least one row.
  template <class F>
  __device__ __forceinline__ void for_each_row(const Tile& tile, F f) const {
    const int warp_start = static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize;
    const int step = static_cast<int>(blockDim.x);
    Row row = row_at(tile, 0);
    for (int pass = 0; pass + warp_start < tile.num_lanes; pass += step) {
      const Row next = row_at(tile, pass + step);
      if constexpr (std::is_invocable_v<F, Row, Row>) {
        f(row, next);
      } else {
        f(row);
      }
      row = next;
    }
  }

  template <class T>
  __device__ __forceinline__ RawPart<T, kVec> fetch(const void* base, DType dtype,
                                                    const Row& row) const {
    RawPart<T, kVec> raw = {};
    if (row.is_active) {
      for_each_vector([&](int k, int v) {
        raw.v[k][v] = Storage<T>::template load<kVec>(base, dtype, row.start + place[k].dim[v]);
      });
    }
    return raw;
  }

  template <class T>
  __device__ __forceinline__ Part unpack(const RawPart<T, kVec>& raw) const {
    Part part;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) part.v[k][v][i] = to_float(raw.v[k][v].elements[i]);
      }
    }
    return part;
  }

  template <class T>
  __device__ __forceinline__ void store(const Row& row, const Part& part) const {
    if (!row.is_active) return;
    for_each_vector([&](int k, int v) {
      Storage<T>::store(p.out, p.output_dtype, row.start + place[k].dim[v], part.v[k][v]);
    });
  }

  // f(value of part, parameter at the same dim); the parameter is [H*D] or one [D] for all heads.
  template <class F>
  __device__ __forceinline__ void with_parameter(Part& part, const Row& row, const void* parameter,
                                                 DType dtype, bool is_inner, F f) const {
    if (parameter == nullptr) return;
    const int64_t start = is_inner ? static_cast<int64_t>(row.head) * p.head_dim : 0;
    for_each_vector([&](int k, int v) {
      const auto values =
          Storage<AnyType>::template load<kVec>(parameter, dtype, start + place[k].dim[v]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        part.v[k][v][i] = f(part.v[k][v][i], values.elements[i]);
      }
    });
  }

  __device__ __forceinline__ void add_bias(Part& part, const Row& row) const {
    with_parameter(part, row, p.bias, p.bias_dtype, true, [](float x, float b) { return x + b; });
  }

  __device__ __forceinline__ void scale_by_norm_weight(Part& part, const Row& row) const {
    with_parameter(part, row, p.norm_weight, p.norm_dtype, p.norm_inner,
                   [](float x, float w) { return x * w; });
  }

  __device__ __forceinline__ void add_norm_bias(Part& part, const Row& row) const {
    with_parameter(part, row, p.norm_bias, p.norm_dtype, p.norm_inner,
                   [](float x, float b) { return x + b; });
  }

  // Sum of f(k, v, i) over the dims that this lane holds.
  template <class F>
  __device__ __forceinline__ float sum_dims(const Row& row, F f) const {
    float sum = 0.f;
    if (row.is_active) {
      for_each_vector([&](int k, int v) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += f(k, v, i);
      });
    }
    return sum;
  }

  // Angles -------------------------------------------------------------------------------------

  __device__ __forceinline__ float* cos_row(int token) const {
    return shared.angles + token * p.head_dim;
  }
  __device__ __forceinline__ float* sin_row(int token) const {
    return cos_row(g.tokens_per_tile + token);
  }

  // Once a block: frequencies, and the identity for the dims that pass through.
  __device__ __forceinline__ void prepare_angles() const {
    if (!g.stages_angles) return;
    const int half_width = p.rotary_dim / p.axes / 2, passing = p.head_dim - p.rotary_dim;
    for (int pair = threadIdx.x; pair < p.rotary_dim / 2; pair += blockDim.x) {
      shared.frequencies[pair] = inverse_frequency(pair % half_width, 2 * half_width, p.log2_base);
    }
    for (int i = threadIdx.x; i < g.tokens_per_tile * passing; i += blockDim.x) {
      const int token = i / passing, dim = p.rotary_dim + i % passing;
      cos_row(token)[dim] = 1.f;
      sin_row(token)[dim] = 0.f;
    }
  }

  // Once a tile: cosine and sine of every token and dim, shared by all heads.
  __device__ __forceinline__ void stage_angles(const Tile& tile) const {
    const int num_pairs = p.rotary_dim / 2, half_width = num_pairs / p.axes;
    for (int i = threadIdx.x; i < tile.num_tokens * num_pairs; i += blockDim.x) {
      const int token = i / num_pairs, pair = i - token * num_pairs;
      const TokenPlace where = place_of_token(tile, token);
      const double position = position_of(p, where.batch, where.position, pair / half_width);
      const CosSin angle = cos_sin(turns_of(position, shared.frequencies[pair]));
      const PairDims dims = pair_dims(pair, p.rotary_dim, p.axes, p.interleaved);
      cos_row(token)[dims.first] = cos_row(token)[dims.second] = angle.cos;
      sin_row(token)[dims.first] = sin_row(token)[dims.second] = angle.sin;
    }
  }

  __device__ __forceinline__ Angles<kVec> staged_angles(const Row& row) const {
    Angles<kVec> angles = {};
    for_each_vector([&](int k, int v) {
      const auto cos =
          *reinterpret_cast<const Packed<float, kVec>*>(cos_row(row.token) + place[k].dim[v]);
      const auto sin =
          *reinterpret_cast<const Packed<float, kVec>*>(sin_row(row.token) + place[k].dim[v]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        angles.cos.v[k][v][i] = cos.elements[i];
        angles.sin.v[k][v][i] = sin.elements[i];
      }
    });
    return angles;
  }

  __device__ __forceinline__ Angles<kVec> table_angles(const Tile& tile, const Row& row) const {
    const TokenPlace token = place_of_token(tile, row.token);
    const int64_t start = token.batch * p.table_batch_stride +
                          token.position * p.table_token_stride + row.head * p.table_head_stride;
    return pairs_within_vector<kVec>(p.interleaved) && !p.full_width
               ? angles_in_table<2>(p.cos + start, p.sin + start)
               : angles_in_table<1>(p.cos + start, p.sin + start);
  }

  // kDims neighbouring dims share one value; a constant, for addresses with immediate offsets.
  template <int kDims>
  __device__ __forceinline__ Angles<kVec> angles_in_table(const float* cos,
                                                          const float* sin) const {
    Angles<kVec> angles = {};
    for_each_vector([&](int k, int v) {
      const int first = p.full_width ? place[k].dim[v] : place[k].pair[v];
      const int num_rotating = p.rotary_dim - 2 * place[k].pair[v];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        angles.cos.v[k][v][i] = i < num_rotating ? cos[first + i / kDims] : 1.f;
        angles.sin.v[k][v][i] = i < num_rotating ? sin[first + i / kDims] : 0.f;
      }
    });
    return angles;
  }

  // Rotates in place, or with kBack applies the adjoint.
  template <bool kBack>
  __device__ __forceinline__ void turn(Part& part, const Tile& tile, const Row& row) const {
    if (p.rotary_dim == 0 || !row.is_active) return;
    const Angles<kVec> angles = g.stages_angles ? staged_angles(row) : table_angles(tile, row);
    const auto turn_pair = [&](int k, int v0, int i0, int v1, int i1) {
      const Pair x = {part.v[k][v0][i0], part.v[k][v1][i1]};
      const CosSin first = {angles.cos.v[k][v0][i0], angles.sin.v[k][v0][i0]};
      const CosSin second = {angles.cos.v[k][v1][i1], angles.sin.v[k][v1][i1]};
      const Pair y = kBack ? rotate_back(x, first, second) : rotate(x, first, second);
      part.v[k][v0][i0] = y.first;
      part.v[k][v1][i1] = y.second;
    };
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (pairs_within_vector<kVec>(p.interleaved)) {
#pragma unroll
        for (int i = 0; i + 1 < kVec; i += 2) {
          turn_pair(k, 0, i, 0, i + 1);
          turn_pair(k, 1, i, 1, i + 1);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) turn_pair(k, 0, i, 1, i);
      }
    }
  }
};

}  // namespace frx::norm_rope
