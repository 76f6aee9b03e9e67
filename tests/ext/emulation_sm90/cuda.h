// A tensor map as the emulated copy engine reads it.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const uint16_t* data;
  int64_t rows, width;
  int box_rows, box_width;
};
