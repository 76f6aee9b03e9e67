#include "tensor_map.h"

#include <cuda_runtime.h>

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
  static const auto encode = encode_function();
  const int element_bytes = dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 4;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim),
                              static_cast<cuuint64_t>(num_tokens),
                              static_cast<cuuint64_t>(num_heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[] = {stride_bytes(view.token_stride, num_tokens, element_bytes),
                                stride_bytes(view.head_stride, num_heads, element_bytes),
                                stride_bytes(view.batch_stride, batch, element_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_dims), static_cast<cuuint32_t>(box_tokens),
                            1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode(
      &map, data_type(dtype), 4, view.data, sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_dims * element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("fused_rope_xattn: cuTensorMapEncodeTiled failed with status " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace frx
