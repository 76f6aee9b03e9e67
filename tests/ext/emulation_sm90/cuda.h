// A tensor map as the emulated copy engine reads it: of a matrix, of one whose rows are paired
// halves (half > 0), or of one a head and batch element.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const char* data;
  int64_t rows, width;
  int box_rows, box_width;
  int half = 0, box_chunks = 0;
  int64_t token_stride = 0, head_stride = 0, batch_stride = 0;  // token_stride 0: a matrix
  int element_bytes = 2;                                        // 4: rounded to TF32
};
