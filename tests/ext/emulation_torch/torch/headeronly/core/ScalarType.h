// Stands in for torch's header where bindings are compiled into a test extension.
#pragma once

#include <stdexcept>

namespace torch::headeronly {

enum class ScalarType { Float, Half, BFloat16, Int, Long, Double, Byte };
constexpr const char* kTypeNames[] = {"float32", "float16", "bfloat16", "int32",
                                      "int64",   "float64", "uint8"};

}  // namespace torch::headeronly

#define STD_TORCH_CHECK(condition, ...)                     \
  do {                                                      \
    if (!(condition)) throw std::runtime_error(#condition); \
  } while (false)
