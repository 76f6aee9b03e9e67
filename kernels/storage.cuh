// Elements as they lie in memory, read and written as fp32 values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.h"

namespace frx {

// kCount elements moved by one instruction.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Packed {
  T elements[kCount];
};

// Stands for an element type that only the DType beside it tells, at run time.
struct AnyType {};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The type that Storage<T> keeps in registers between load and use.
template <class T>
struct Storage {
  using Register = T;

  template <int kCount>
  static __device__ __forceinline__ Packed<T, kCount> load(const void* base, DType, int64_t index) {
    return *reinterpret_cast<const Packed<T, kCount>*>(static_cast<const T*>(base) + index);
  }

  template <int kCount>
  static __device__ __forceinline__ void store(void* base, DType, int64_t index,
                                               const float (&values)[kCount]) {
    Packed<T, kCount> packed;
#pragma unroll
    for (int i = 0; i < kCount; ++i) packed.elements[i] = from_float<T>(values[i]);
    *reinterpret_cast<Packed<T, kCount>*>(static_cast<T*>(base) + index) = packed;
  }
};

template <>
struct Storage<AnyType> {
  using Register = float;

  template <class T, int kCount>
  static __device__ __forceinline__ Packed<float, kCount> load_as(const void* base, int64_t index) {
    const Packed<T, kCount> packed = Storage<T>::template load<kCount>(base, DType(), index);
    Packed<float, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values.elements[i] = to_float(packed.elements[i]);
    return values;
  }

  template <int kCount>
  static __device__ __forceinline__ Packed<float, kCount> load(const void* base, DType dtype,
                                                               int64_t index) {
    switch (dtype) {
      case DType::kFloat16:
        return load_as<__half, kCount>(base, index);
      case DType::kBFloat16:
        return load_as<__nv_bfloat16, kCount>(base, index);
      default:
        return load_as<float, kCount>(base, index);
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void store(void* base, DType dtype, int64_t index,
                                               const float (&values)[kCount]) {
    switch (dtype) {
      case DType::kFloat16:
        return Storage<__half>::store(base, dtype, index, values);
      case DType::kBFloat16:
        return Storage<__nv_bfloat16>::store(base, dtype, index, values);
      default:
        return Storage<float>::store(base, dtype, index, values);
    }
  }
};

}  // namespace frx
