// A tensor map as the emulated copy engine reads it: of a matrix, or of one whose rows are paired
// halves (half > 0).
#pragma once

#include <cstdint>

struct CUtensorMap {
  const uint16_t* data;
  int64_t rows, width;
  int box_rows, box_width;
  int half = 0, box_chunks = 0;
};
