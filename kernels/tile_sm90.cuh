// Tiles of a [B, T, H, D] tensor in shared memory, as the copy engine writes and wgmma reads them:
// [slab][token][dim], a slab at most 64 dims wide, rows swizzled over their own width.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx_sm90.cuh"

namespace frx {

constexpr int kWarpgroup = 128;

// One thread: a tile of tokens of one head, slab by slab, completing on `full`.
template <class Word, int kSlabs, int kTokens, int kSlabDims>
__device__ __forceinline__ void load_tile(Word (&tile)[kSlabs][kTokens][kSlabDims],
                                          const CUtensorMap& map, uint64_t& full, int first_token,
                                          int head, int batch) {
  mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    cp_async_bulk_tensor_4d(&tile[slab], map, full, slab * kSlabDims, first_token, head, batch);
  }
}

// One thread: the values of a range of keys, all dims, from transposed V [B, Hkv, D, Tk].
template <int kSlabs, int kDims, int kSlabKeys>
__device__ __forceinline__ void load_transposed_tile(float (&tile)[kSlabs][kDims][kSlabKeys],
                                                     const CUtensorMap& map, uint64_t& full,
                                                     int first_key, int head, int batch) {
  mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    cp_async_bulk_tensor_4d(&tile[slab], map, full, first_key + slab * kSlabKeys, 0, head, batch);
  }
}

// One warpgroup: rows [begin, end) for which exists(row) is false become zero. The caller orders
// these writes before the tensor cores' reads.
template <class Word, int kSlabs, int kTokens, int kSlabDims, class Exists>
__device__ __forceinline__ void clear_absent_rows(Word (&tile)[kSlabs][kTokens][kSlabDims],
                                                  int begin, int end, int thread, Exists exists) {
  for (int row = begin + thread; row < end; row += kWarpgroup) {
    if (exists(row)) continue;
    for (int slab = 0; slab < kSlabs; ++slab) {
      uint4* chunks = reinterpret_cast<uint4*>(tile[slab][row]);
      for (int i = 0; i < static_cast<int>(sizeof(tile[0][0]) / sizeof(uint4)); ++i) {
        chunks[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }
}

}  // namespace frx
