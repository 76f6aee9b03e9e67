// A [rows, kD] tile in shared memory, swizzled in 16-byte chunks so that ldmatrix and row copies
// are free of bank conflicts, and its asynchronous fill from global memory.
#pragma once

#include <cstdint>

namespace frx {

// The same value, but opaque to the compiler: addresses derived from it inside a loop stay in the
// loop instead of being hoisted into registers that the accumulators need.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

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

// 16 bytes from global to shared memory.
__device__ __forceinline__ void copy_async_16(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(gmem));
}

// The same, zeros where the source does not exist.
__device__ __forceinline__ void copy_async_16(uint32_t smem, const void* gmem, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(exists ? 16 : 0));
}
__device__ __forceinline__ void copy_async_16(void* smem, const void* gmem, bool exists) {
  copy_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(smem)), gmem, exists);
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

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
