// Tensor-core operators of the portable kernels (sm_80 and newer): how a warp loads the fragments
// of one m16n8 product and multiplies them. An operator fixes the element type and the number of
// products; the kernels above it are written once.
//
// Fragment layout of the fp32 accumulator c[4] of an m16n8 product, with g = lane / 4, t = lane %
// 4: c[0], c[1] = row g, columns 2t and 2t + 1; c[2], c[3] = row g + 8, the same columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"
#include "tile.cuh"

namespace frx {

__device__ __forceinline__ uint32_t pack2(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack2(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Two neighbouring elements of a row.
__device__ __forceinline__ void store2(float* out, float x, float y) {
  *reinterpret_cast<float2*>(out) = make_float2(x, y);
}
template <class T>
__device__ __forceinline__ void store2(T* out, float x, float y) {
  *reinterpret_cast<uint32_t*>(out) = pack2(x, y, T());
}

// One 16-bit product, fp32 accumulation.
template <class T>
struct HalfOp {
  using Element = T;
  static constexpr int kK = 16;    // depth of one product
  static constexpr int kSums = 4;  // accumulators a thread has of one product
  static constexpr int kDepthUnroll = 16;
  static constexpr bool kSplits = false;  // operands in two parts, in twice the registers

  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };

  template <class Tile>
  static __device__ A load_a(Tile tile, int row, int k_step, int lane) {
    A a;
    ldmatrix_x4(a.r, tile.address(row + lane % 16, 2 * k_step + lane / 16));
    return a;
  }

  // The accumulators of two neighbouring n8 tiles as the left operand of the next product.
  static __device__ A from_accumulators(const float (*c)[4]) {
    return {{pack2(c[0][0], c[0][1], T()), pack2(c[0][2], c[0][3], T()),
             pack2(c[1][0], c[1][1], T()), pack2(c[1][2], c[1][3], T())}};
  }

  // Right operand from a tile whose rows are the product's columns: b[0] for columns
  // [row, row + 8), b[1] for the next eight.
  template <class Tile>
  static __device__ void load_b(B (&b)[2], Tile tile, int row, int k_step, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.address(row + lane % 8 + 8 * (lane / 16), 2 * k_step + lane / 8 % 2));
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  }

  // Right operand from a tile whose rows are the product's depth; the two n8 tiles start at
  // column `column`. Its depth order matches from_accumulators.
  template <class Tile>
  static __device__ void load_b_transposed(B (&b)[2], Tile tile, int k_step, int column, int lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile.address(16 * k_step + lane % 16, column / 8 + lane / 16));
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  }

  static __device__ void multiply_add(float (&c)[4], const A& a, const B& b) {
    mma_m16n8k16(c, a.r, b.r[0], b.r[1], T());
  }
};

// fp32 operands. kTerms == 1 rounds them to TF32 once. kTerms == 4 splits each into a TF32 head and
// tail and adds all four products; each step accumulates from zero and is then added in fp32,
// because the tensor core truncates its running sum. Over 64 and more terms that beats a chain of
// fp32 additions; over 8 the bits that two TF32 numbers cannot hold cost 1.45 times its error
// (emulated).
template <int kTerms>
struct Tf32Op {
  static_assert(kTerms == 1 || kTerms == 4, "one TF32 product, or four for fp32 accuracy");
  using Element = float;
  static constexpr int kK = 8, kSums = 4;
  // Unrolling further lets the compiler load so far ahead that it spills.
  static constexpr int kDepthUnroll = 2;
  static constexpr bool kSplits = kTerms == 4;

  struct A {
    uint32_t head[4];
    uint32_t tail[kTerms == 4 ? 4 : 1];
  };
  struct B {
    uint32_t r[2];
  };

  static __device__ void split(uint32_t bits, uint32_t& head, uint32_t& tail) {
    const float x = __uint_as_float(bits);
    head = round_to_tf32(x);
    tail = round_to_tf32(x - __uint_as_float(head));
  }

  static __device__ A prepare(const uint32_t (&r)[4]) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kTerms == 4) {
        split(r[i], a.head[i], a.tail[i]);
      } else {
        a.head[i] = round_to_tf32(__uint_as_float(r[i]));
      }
    }
    return a;
  }

  template <class Tile>
  static __device__ A load_a(Tile tile, int row, int k_step, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.address(row + lane % 16, 2 * k_step + lane / 16));
    return prepare(r);
  }

  // A product sums over its depth in any order, so accumulator columns 2t and 2t + 1 serve as
  // depths t and t + 4 without moving; load_b_transposed reads its rows in the same order.
  static __device__ A from_accumulators(const float (*c)[4]) {
    const uint32_t r[4] = {__float_as_uint(c[0][0]), __float_as_uint(c[0][2]),
                           __float_as_uint(c[0][1]), __float_as_uint(c[0][3])};
    return prepare(r);
  }

  template <class Tile>
  static __device__ void load_b(B (&b)[2], Tile tile, int row, int k_step, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.address(row + lane % 8 + 8 * (lane / 16), 2 * k_step + lane / 8 % 2));
    b[0] = {{r[0], r[1]}};
    b[1] = {{r[2], r[3]}};
  }

  template <class Tile>
  static __device__ void load_b_transposed(B (&b)[2], Tile tile, int k_step, int column, int lane) {
    const int row = 8 * k_step + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[n].r[i] = load_shared_word(tile.element_address(row + i, column + 8 * n + lane / 4));
      }
    }
  }

  static __device__ void multiply_add(float (&c)[4], const A& a, const B& b) {
    if constexpr (kTerms == 1) {
      mma_m16n8k8_tf32(c, a.head, round_to_tf32(__uint_as_float(b.r[0])),
                       round_to_tf32(__uint_as_float(b.r[1])));
    } else {
      uint32_t head[2], tail[2];
      split(b.r[0], head[0], tail[0]);
      split(b.r[1], head[1], tail[1]);
      float step[4] = {0.f, 0.f, 0.f, 0.f};
      mma_m16n8k8_tf32(step, a.tail, tail[0], tail[1]);
      mma_m16n8k8_tf32(step, a.head, tail[0], tail[1]);
      mma_m16n8k8_tf32(step, a.tail, head[0], head[1]);
      mma_m16n8k8_tf32(step, a.head, head[0], head[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += step[i];
    }
  }
};

// fp32 operands as sums of three bf16 numbers, which hold all 24 bits, and the six largest of their
// nine products. Sums in a tensor core show a bias towards zero, as if it cut off what they cannot
// hold: over many steps as large as all rounding together. Here it has nothing to cut: products of
// leading parts have 16 bits, accumulate from zero in each step, and are added in fp32; what the
// other five lose is 2^-8 of that. Loads operands from tiles only.
struct Bf16x6Op {
  using Element = float;
  static constexpr int kK = 16, kSums = 8;  // of leading parts, then of all others
  static constexpr int kDepthUnroll = 1;
  static constexpr bool kSplits = true;

  // Each register holds the parts of two elements, 4 apart in the depth: a product sums over its
  // depth in any order, as long as both operands have the same.
  struct A {
    uint32_t parts[3][4];
  };
  struct B {
    uint32_t parts[3][2];
  };

  // Both numbers in three parts, each rounded to nearest. Cut off instead, all parts would have the
  // number's sign, and the three products left out would add up to 2^-23 of the result.
  static __device__ __forceinline__ void split(uint32_t (&parts)[3], uint32_t first,
                                               uint32_t second) {
    float x = __uint_as_float(first), y = __uint_as_float(second);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      parts[i] = pack2(x, y, __nv_bfloat16());
      x -= __uint_as_float(parts[i] << 16);
      y -= __uint_as_float(parts[i] & 0xffff0000u);
    }
  }

  template <class Tile>
  static __device__ A load_a(Tile tile, int row, int k_step, int lane) {
    A a;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t r[4];  // rows g and g + 8 at depth t, then at t + 4
      ldmatrix_x4(r, tile.address(row + lane % 16, 4 * k_step + 2 * half + lane / 16));
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        uint32_t parts[3];
        split(parts, r[low], r[2 + low]);
#pragma unroll
        for (int i = 0; i < 3; ++i) a.parts[i][2 * half + low] = parts[i];
      }
    }
    return a;
  }

  template <class Tile>
  static __device__ void load_b(B (&b)[2], Tile tile, int row, int k_step, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t r[4];  // columns of the first tile at depths t and t + 4, then of the second
      ldmatrix_x4(
          r, tile.address(row + lane % 8 + 8 * (lane / 16), 4 * k_step + 2 * half + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t parts[3];
        split(parts, r[2 * n], r[2 * n + 1]);
#pragma unroll
        for (int i = 0; i < 3; ++i) b[n].parts[i][half] = parts[i];
      }
    }
  }

  static __device__ void multiply_add(float (&c)[kSums], const A& a, const B& b) {
    float step[4] = {0.f, 0.f, 0.f, 0.f}, rest[4] = {c[4], c[5], c[6], c[7]};
    multiply(step, a, 0, b, 0);
#pragma unroll
    for (int order = 2; order > 0; --order) {  // the smallest first
#pragma unroll
      for (int i = 0; i <= order; ++i) multiply(rest, a, i, b, order - i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[i] += step[i];
      c[4 + i] = rest[i];
    }
  }

  static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, int a_part, const B& b,
                                                  int b_part) {
    mma_m16n8k16(c, a.parts[a_part], b.parts[b_part][0], b.parts[b_part][1], __nv_bfloat16());
  }
};

// c[m][n] += a-rows * b-rows^T over the whole depth kD. Warp rows start at `a_row`.
template <class Op, int kMT, int kNT, int kD, class TileA, class TileB>
__device__ __forceinline__ void multiply_rows(float (&c)[kMT][kNT][4], TileA a_tile, int a_row,
                                              TileB b_tile, int lane) {
#pragma unroll(Op::kDepthUnroll)
  for (int k = 0; k < kD / Op::kK; ++k) {
    typename Op::A a[kMT];
#pragma unroll
    for (int m = 0; m < kMT; ++m) a[m] = Op::load_a(a_tile, a_row + 16 * m, k, lane);
#pragma unroll
    for (int n = 0; n < kNT; n += 2) {
      typename Op::B b[2];
      Op::load_b(b, b_tile, 8 * n, k, lane);
#pragma unroll
      for (int m = 0; m < kMT; ++m) {
        Op::multiply_add(c[m][n], a[m], b[0]);
        Op::multiply_add(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// c[m][n] += p * tile, where p holds kNT accumulator tiles of the previous product and the tile's
// rows are p's columns. Output columns start at `column`.
template <class Op, int kMT, int kNT, int kOutT, class Tile>
__device__ __forceinline__ void multiply_accumulators(float (&c)[kMT][kOutT][4],
                                                      const float (&p)[kMT][kNT][4], Tile tile,
                                                      int column, int lane) {
#pragma unroll
  for (int k = 0; k < kNT * 8 / Op::kK; ++k) {
    typename Op::A a[kMT];
#pragma unroll
    for (int m = 0; m < kMT; ++m) a[m] = Op::from_accumulators(&p[m][k * Op::kK / 8]);
#pragma unroll
    for (int n = 0; n < kOutT; n += 2) {
      typename Op::B b[2];
      Op::load_b_transposed(b, tile, k, column + 8 * n, lane);
#pragma unroll
      for (int m = 0; m < kMT; ++m) {
        Op::multiply_add(c[m][n], a[m], b[0]);
        Op::multiply_add(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

}  // namespace frx
