#include "tensor_map.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace frx {

namespace {

constexpr int64_t kStrideAlignment = 16;
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

// A dimension of size 1 is never stepped over, so torch may give it any stride, and the driver
// any valid one.
cuuint64_t stride_bytes(int64_t stride, int64_t size, int element_bytes) {
  return static_cast<cuuint64_t>(size == 1 ? kStrideAlignment : stride * element_bytes);
}

bool is_stride_possible(int64_t stride, int64_t size, int element_bytes) {
  if (size == 1) return true;
  const int64_t bytes = stride * element_bytes;
  return stride > 0 && bytes % kStrideAlignment == 0 && bytes < kMaxStrideBytes;
}

int bytes_of(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 4; }

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kTF32:
      return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

// The driver's function, looked up at run time: the extension does not link to libcuda.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  constexpr unsigned kIntroducedIn = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kIntroducedIn, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("fused_rope_xattn: the CUDA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

template <int kRank>
CUtensorMap encode(DType dtype, void* data, const cuuint64_t (&sizes)[kRank],
                   const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                   CUtensorMapSwizzle swizzle) {
  static const auto function = encode_function();
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  CUtensorMap map;
  const CUresult status =
      function(&map, data_type(dtype), kRank, data, sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("fused_rope_xattn: cuTensorMapEncodeTiled failed with status " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace

bool is_tensor_map_possible(const HeadsView& view, int64_t batch, int num_tokens, int num_heads,
                            int element_bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % kStrideAlignment == 0 &&
         is_stride_possible(view.token_stride, num_tokens, element_bytes) &&
         is_stride_possible(view.head_stride, num_heads, element_bytes) &&
         is_stride_possible(view.batch_stride, batch, element_bytes);
}

CUtensorMap make_heads_map(const HeadsView& view, DType dtype, int64_t batch, int num_tokens,
                           int num_heads, int head_dim, int box_dims, int box_tokens) {
  const int element_bytes = bytes_of(dtype);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim),
                              static_cast<cuuint64_t>(num_tokens),
                              static_cast<cuuint64_t>(num_heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[] = {stride_bytes(view.token_stride, num_tokens, element_bytes),
                                stride_bytes(view.head_stride, num_heads, element_bytes),
                                stride_bytes(view.batch_stride, batch, element_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_dims), static_cast<cuuint32_t>(box_tokens),
                            1, 1};
  return encode<4>(
      dtype, view.data, sizes, strides, box,
      box_dims * element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap make_halves_map(const void* data, DType dtype, int rows, int width, int half,
                            int box_chunks, int box_axes) {
  constexpr int kChunk = 8, kBoxBytes = 128;
  const int element_bytes = bytes_of(dtype);
  const cuuint64_t row_bytes = element_bytes * static_cast<cuuint64_t>(width);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), kChunk, 2,
                              static_cast<cuuint64_t>(half / kChunk),
                              static_cast<cuuint64_t>(rows / (2 * half))};
  const cuuint64_t strides[] = {row_bytes, half * row_bytes, kChunk * row_bytes,
                                2 * half * row_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kBoxBytes / element_bytes), kChunk, 2,
                            static_cast<cuuint32_t>(box_chunks), static_cast<cuuint32_t>(box_axes)};
  return encode<5>(dtype, const_cast<void*>(data), sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace frx
