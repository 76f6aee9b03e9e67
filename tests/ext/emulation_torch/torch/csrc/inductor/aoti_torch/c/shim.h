// The part of torch's C interface that the bindings call.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

using AtenTensorHandle = PyObject*;

// Defined by the extension.
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                 int32_t dtype, int32_t device_type, int32_t device_index,
                                 AtenTensorHandle* made);

inline int32_t aoti_torch_device_type_cuda() { return 1; }

#define EMULATED_DTYPE(name, type)                                    \
  inline int32_t aoti_torch_dtype_##name() {                          \
    return static_cast<int32_t>(torch::headeronly::ScalarType::type); \
  }
EMULATED_DTYPE(float32, Float)
EMULATED_DTYPE(float16, Half)
EMULATED_DTYPE(bfloat16, BFloat16)
EMULATED_DTYPE(uint8, Byte)
#undef EMULATED_DTYPE
