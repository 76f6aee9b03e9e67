// Asynchronous copies of rows into a swizzled tile, with all that does not change from one tile to
// the next worked out once: where small problems spend their time is in instructions, not in bytes.
#pragma once

#include "tile.cuh"

namespace frx {

// kThreads threads share a copy of kRows rows: each moves 16 bytes of every kRowStep-th row.
template <class Tile, int kRows, int kThreads>
class RowCopier {
 public:
  // Rows from the thread's first to its next.
  static constexpr int kRowStep = kThreads / Tile::kChunks;

  __device__ __forceinline__ explicit RowCopier(int thread)
      : row_(thread / Tile::kChunks),
        column_(thread % Tile::kChunks * Tile::kChunkElements),
        target_(Tile{nullptr}.swizzled(row_, thread % Tile::kChunks)) {}

  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int column() const { return column_; }

  // source: this thread's 16 bytes of its first row; `tile`: the tile's address in shared memory.
  __device__ __forceinline__ void copy(uint32_t tile, const char* source,
                                       int64_t step_bytes) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (kRows % kRowStep != 0 && row_ + pass * kRowStep >= kRows) break;
      copy_async_16(tile + target(pass), source + pass * step_bytes);
    }
  }

  // Only rows for which exists(row) is true; the others become zeros. Where this thread's first row
  // does not exist, source may be any address.
  template <class Exists>
  __device__ __forceinline__ void copy(uint32_t tile, const char* source, int64_t step_bytes,
                                       Exists exists) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (kRows % kRowStep != 0 && row_ + pass * kRowStep >= kRows) break;
      const bool row_exists = exists(row_ + pass * kRowStep);
      copy_async_16(tile + target(pass), row_exists ? source + pass * step_bytes : source,
                    row_exists);
    }
  }

 private:
  static constexpr int kPasses = (kRows + kRowStep - 1) / kRowStep;
  // Bits of row_ and of pass * kRowStep do not meet, so the swizzles of both add up by xor.
  __device__ __forceinline__ uint32_t target(int pass) const {
    constexpr int kMask = Tile::kChunks >= 8 ? 7 : Tile::kChunks - 1;
    const int swizzle = pass * kRowStep / Tile::kRowsALine & kMask;
    return 16 * ((target_ ^ swizzle) + pass * kRowStep * Tile::kChunks);
  }

  static_assert(kThreads % Tile::kChunks == 0 && (kRowStep & (kRowStep - 1)) == 0, "whole rows");

  int row_, column_;
  uint32_t target_;  // in units of 16 bytes
};

}  // namespace frx
