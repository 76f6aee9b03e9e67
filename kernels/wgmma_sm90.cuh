// wgmma: one warpgroup multiplies [64, 16] x [16, N] of bf16 or fp16, or [64, 8] x [8, N] of TF32,
// into fp32 registers. Either way a step in k is 32 bytes.
//
// Fragments, for lane l of warp w (0-3) of the warpgroup, with g = l / 4 and t = l % 4:
//   accumulator d[4n + 2i + e] is row 16w + g + 8i, column 8n + 2t + e
//   register operand a[2n + i] packs columns 8n + 2t, 8n + 2t + 1 of row 16w + g + 8i
//   register operand a[2e + i] in TF32 is column t + 4e of row 16w + g + 8i
// so the accumulators of 16 columns, packed in pairs, are the register operand of 16 k values. In
// TF32 the accumulators of 8 columns are that of 8, if column 2t + e of the one is k = t + 4e of
// the other: the second operand then has its k in that order too (tf32.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "tf32.h"

namespace frx {

// ---- synchronisation --------------------------------------------------------------------------

// Earlier register writes are visible to the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warp's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers across a fence or a wait: it does not know
// that wgmma writes them later.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin_registers(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// ---- shared-memory operands -------------------------------------------------------------------

// A matrix descriptor: low word = address and leading offset, high word = stride offset and
// swizzle mode, all offsets in units of 16 bytes.
struct SmemDescriptor {
  uint32_t low;
  uint32_t high;

  // The same matrix `bytes` further on; bytes is a multiple of 16.
  __device__ __forceinline__ SmemDescriptor operator+(uint32_t bytes) const {
    return {low + (bytes >> 4), high};
  }
  __device__ __forceinline__ uint64_t bits() const {
    return static_cast<uint64_t>(high) << 32 | low;
  }
};

constexpr uint32_t kWithinBlock = 0x3FFFF;  // in a cluster upper bits say whose memory it is in

// Rows of kRowBytes (64 or 128), swizzled over as many bytes, as the copy engine writes them. Eight
// rows make the repeating unit: stride_bytes apart is the next eight. Only an operand whose
// contiguous dimension is not k, and wider than a row, uses leading_bytes: the distance to its next
// kRowBytes.
template <int kRowBytes>
__device__ __forceinline__ SmemDescriptor swizzled_descriptor(uint32_t address,
                                                              uint32_t leading_bytes) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint32_t kStrideBytes = 8 * kRowBytes;
  constexpr uint32_t kSwizzleMode = kRowBytes == 128 ? 1 : 2;
  return {(address & kWithinBlock) >> 4 | (leading_bytes >> 4) << 16,
          kStrideBytes >> 4 | kSwizzleMode << 30};
}

// Core matrices, 8 rows of 16 bytes that follow each other, without swizzle. Two of them along k
// make an operand of 16 k: `along_k` and `across` bytes are from one to the next in k and in the
// other dimension.
__device__ __forceinline__ SmemDescriptor core_descriptor(uint32_t address, uint32_t along_k,
                                                          uint32_t across) {
  return {(address & kWithinBlock) >> 4 | (along_k >> 4) << 16, across >> 4};
}

// ---- the products -----------------------------------------------------------------------------

// Wgmma<Element, N>::ss(d, a, b, accumulate): d = a b^T (+ d), both operands with k contiguous;
//                   ss<true>(...):            d = a b (+ d), with n contiguous in b;
//                   ss<true, true>(...):      the same, with m contiguous in a.
// Wgmma<Element, N>::rs(d, a0..a3, b):        d += a b, with n contiguous in b.
// In TF32 k is contiguous in b always: there is no ss<true>, and rs adds a b^T.
template <class Element, int kColumns>
struct Wgmma;

// clang-format off
#define FRX_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FRX_D16 FRX_D8(0), FRX_D8(8)
#define FRX_D32 FRX_D16, FRX_D8(16), FRX_D8(24)
#define FRX_D40 FRX_D32, FRX_D8(32)
#define FRX_D48 FRX_D40, FRX_D8(40)
#define FRX_D64 FRX_D48, FRX_D8(48), FRX_D8(56)
#define FRX_D80 FRX_D64, FRX_D8(64), FRX_D8(72)
#define FRX_D88 FRX_D80, FRX_D8(80)
#define FRX_D128 FRX_D88, FRX_D8(88), FRX_D8(96), FRX_D8(104), FRX_D8(112), FRX_D8(120)

#define FRX_T16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11" \
                ", %12, %13, %14, %15"
#define FRX_T32 FRX_T16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27" \
                ", %28, %29, %30, %31"
#define FRX_T40 FRX_T32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FRX_T48 FRX_T40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FRX_T64 FRX_T48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60" \
                ", %61, %62, %63"
#define FRX_T80 FRX_T64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75" \
                ", %76, %77, %78, %79"
#define FRX_T88 FRX_T80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FRX_T128 FRX_T88 ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99" \
                ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
                ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123" \
                ", %124, %125, %126, %127"

// COUNT = N / 2 accumulators a thread; I0..I4 are the operand numbers that follow them.
#define FRX_WGMMA(ELEMENT, NAME, N, COUNT, I0, I1, I2, I3, I4) \
  template <> \
  struct Wgmma<ELEMENT, N> { \
    template <bool kColumnsContiguous = false, bool kRowsContiguous = false> \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], SmemDescriptor a, \
                                              SmemDescriptor b, bool accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                   " {" FRX_T##COUNT "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I4 ", %" #I3 ";\n}" \
                   : FRX_D##COUNT \
                   : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(accumulate)), \
                     "n"(kColumnsContiguous ? 1 : 0), "n"(kRowsContiguous ? 1 : 0)); \
    } \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], uint32_t a0, uint32_t a1, \
                                              uint32_t a2, uint32_t a3, SmemDescriptor b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                   " {" FRX_T##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 \
                   ", p, 1, 1, 1;\n}" \
                   : FRX_D##COUNT \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b.bits())); \
    } \
  };
#define FRX_WGMMA_TYPES(...) \
  FRX_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__) FRX_WGMMA(__half, "f16", __VA_ARGS__)

#define FRX_WGMMA_TF32(N, COUNT, I0, I1, I2, I3, I4) \
  template <> \
  struct Wgmma<Tf32, N> { \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], SmemDescriptor a, \
                                              SmemDescriptor b, bool accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32" \
                   " {" FRX_T##COUNT "}, %" #I0 ", %" #I1 ", p, 1, 1;\n}" \
                   : FRX_D##COUNT \
                   : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(accumulate))); \
    } \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], uint32_t a0, uint32_t a1, \
                                              uint32_t a2, uint32_t a3, SmemDescriptor b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32" \
                   " {" FRX_T##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 \
                   ", p, 1, 1;\n}" \
                   : FRX_D##COUNT \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b.bits())); \
    } \
  };

FRX_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20)
FRX_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36)
FRX_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44)
FRX_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52)
FRX_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68)
FRX_WGMMA_TYPES(160, 80, 80, 81, 82, 83, 84)
FRX_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92)
FRX_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132)

FRX_WGMMA_TF32(32, 16, 16, 17, 18, 19, 20)
FRX_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36)
FRX_WGMMA_TF32(96, 48, 48, 49, 50, 51, 52)
FRX_WGMMA_TF32(128, 64, 64, 65, 66, 67, 68)
// clang-format on

#undef FRX_WGMMA_TF32
#undef FRX_WGMMA_TYPES
#undef FRX_WGMMA
#undef FRX_D8
#undef FRX_D16
#undef FRX_D32
#undef FRX_D40
#undef FRX_D48
#undef FRX_D64
#undef FRX_D80
#undef FRX_D88
#undef FRX_D128
#undef FRX_T16
#undef FRX_T32
#undef FRX_T40
#undef FRX_T48
#undef FRX_T64
#undef FRX_T80
#undef FRX_T88
#undef FRX_T128

}  // namespace frx
