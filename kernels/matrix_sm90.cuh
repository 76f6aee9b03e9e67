// Operands of matrix products on Hopper on their way to shared memory: what describes them to the
// copy engine, and the ring of stages that they go through.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tensor_map.h"

namespace frx {

constexpr int kMatrixBoxWidth = 64;  // of bf16 and fp16, 128 bytes

// A [rows, width] matrix whose rows are so many numbers apart, in boxes of box_rows and 128 bytes.
inline CUtensorMap matrix_map(const void* data, DType dtype, int rows, int width,
                              int64_t row_stride, int box_rows) {
  const HeadsView view = {const_cast<void*>(data), 0, row_stride, 0};
  const int box_width = dtype == DType::kTF32 ? kMatrixBoxWidth / 2 : kMatrixBoxWidth;
  return make_heads_map(view, dtype, 1, rows, 1, width, box_width, box_rows);
}

// A place in the ring: the stage, and how often the ring has been walked around, modulo 2.
template <int kStages>
struct RingPlace {
  uint32_t stage, parity;

  // position counts the stages since the block's start.
  explicit __device__ __forceinline__ RingPlace(uint32_t position)
      : stage(position % kStages), parity(position / kStages & 1) {}
  __device__ __forceinline__ void advance() {
    const bool is_last = stage == kStages - 1;
    stage = is_last ? 0 : stage + 1;
    parity ^= is_last;
  }
};

}  // namespace frx
