// A [rows, kD] tile in shared memory, swizzled in 16-byte chunks so that ldmatrix and row copies
// are free of bank conflicts, and its asynchronous fill from global memory.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace frx {

template <class Element, int kD>
struct SmemTile {
  static constexpr int kChunkElements = 16 / sizeof(Element);
  static constexpr int kChunks = kD / kChunkElements;                // 16-byte chunks a row
  static constexpr int kRowsALine = kChunks >= 8 ? 1 : 8 / kChunks;  // rows that share 128 bytes
  static_assert(kChunks >= 2 && (kChunks & (kChunks - 1)) == 0, "a row is 2^n chunks");

  Element* data;

  // Chunks of eight neighbouring rows at one logical column fall into distinct banks.
  __device__ __forceinline__ int swizzled(int row, int chunk) const {
    constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
    return row * kChunks + (chunk ^ (row / kRowsALine & kMask));
  }
  __device__ __forceinline__ Element* chunk(int row, int chunk) const {
    return data + swizzled(row, chunk) * kChunkElements;
  }
  __device__ __forceinline__ uint32_t address(int row, int chunk_index) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(chunk(row, chunk_index)));
  }
  __device__ __forceinline__ uint32_t element_address(int row, int column) const {
    return address(row, column / kChunkElements) + column % kChunkElements * sizeof(Element);
  }
};

// Starts the copy of kRows rows of `head_dim` elements. Rows for which row_exists(row) is false and
// columns at and beyond head_dim become zeros, so that nothing stale (NaN above all) is multiplied.
// `thread` counts those who share the copy, kThreads of them.
template <int kRows, int kThreads, class Element, int kD, class RowExists>
__device__ __forceinline__ void load_tile(SmemTile<Element, kD> tile, const Element* gmem,
                                          int64_t row_stride, int head_dim, RowExists row_exists,
                                          int thread = threadIdx.x) {
  using Tile = SmemTile<Element, kD>;
#pragma unroll
  for (int i = thread; i < kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const bool exists = chunk * Tile::kChunkElements < head_dim && row_exists(row);
    const Element* source = exists ? gmem + row * row_stride + chunk * Tile::kChunkElements : gmem;
    copy_async_16(tile.address(row, chunk), source, exists);
  }
}

}  // namespace frx
