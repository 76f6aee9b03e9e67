// From torch's tensors to the plain data of params.h, on libtorch's stable ABI: what the bindings
// share.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "params.h"

namespace frx {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;

inline DType dtype_of(ScalarType type, bool tf32 = false) {
  switch (type) {
    case ScalarType::Float:
      return tf32 ? DType::kTF32 : DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "fused_rope_xattn: CUDA kernels take fp32, fp16 and bf16 tensors");
  }
}

inline int32_t code_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Byte:
      return aoti_torch_dtype_uint8();
    default:
      STD_TORCH_CHECK(false, "fused_rope_xattn: kernels make no tensors of such a type");
  }
}

// Contiguous, by the shim's own function: torch::stable::new_empty looks an operator up by its name
// and boxes every argument, and a small call, which makes six tensors, feels that.
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t elements = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = elements;
    elements *= std::max(sizes[axis], int64_t{1});  // as torch: no stride is 0
  }
  AtenTensorHandle made = nullptr;
  const auto failed = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), code_of(type),
      aoti_torch_device_type_cuda(), like.get_device_index(), &made);
  // The stable ABI loses what torch said. Programs that try again with less look for these words.
  STD_TORCH_CHECK(!failed, "fused_rope_xattn: CUDA out of memory: no room for a tensor of ",
                  elements, " elements; free some, or split the batch");
  return Tensor(made);
}

inline void* data_of(const OptionalTensor& t) { return t.has_value() ? t->data_ptr() : nullptr; }

template <class T>
T* data_as(const OptionalTensor& t) {
  return static_cast<T*>(data_of(t));
}

// Kernels copy rows in pieces of 16 bytes. ops.py has seen to the strides; a view's start it cannot
// see while tracing.
inline Tensor aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 ? t : torch::stable::clone(t);
}

inline int32_t int32_of(int64_t value) {
  STD_TORCH_CHECK(value <= INT32_MAX, "fused_rope_xattn: too large for one launch");
  return static_cast<int32_t>(value);
}

inline HeadsView heads_view(const Tensor& t) {  // [B, T, H, D]
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

// [B|1, H|1, Tq|1, Tk|1]; axes of size 1 are broadcast.
inline ScoresView scores_view(const OptionalTensor& t) {
  if (!t.has_value()) return {nullptr, 0, 0, 0, 0};
  auto stride = [&](int axis) { return t->size(axis) == 1 ? 0 : t->stride(axis); };
  return {t->data_ptr(), stride(0), stride(1), stride(2), stride(3)};
}

inline AttentionSizes sizes_of(const Tensor& q, const Tensor& k) {
  STD_TORCH_CHECK(
      q.size(3) % 8 == 0 && q.size(3) <= 256,
      "fused_rope_xattn: attention kernels take head dims that are multiples of 8 up to 256");
  STD_TORCH_CHECK(q.size(1) <= INT32_MAX && k.size(1) <= INT32_MAX,
                  "fused_rope_xattn: sequences are limited to 2^31 - 1 tokens");
  return {q.size(0),
          static_cast<int32_t>(q.size(1)),
          static_cast<int32_t>(k.size(1)),
          static_cast<int32_t>(q.size(2)),
          static_cast<int32_t>(k.size(2)),
          static_cast<int32_t>(q.size(3))};
}

inline ScoreModifiers modifiers(const OptionalTensor& attn_bias, const OptionalTensor& keep_mask,
                                const OptionalTensor& key_keep, const OptionalTensor& kv_lengths,
                                const OptionalTensor& seed, double scale, bool is_causal,
                                double dropout_p) {
  ScoreModifiers m{};
  m.bias = scores_view(attn_bias);
  if (attn_bias.has_value()) m.bias_dtype = dtype_of(attn_bias->scalar_type());
  m.keep_mask = scores_view(keep_mask);
  m.key_keep = data_as<bool>(key_keep);
  m.kv_lengths = data_as<int32_t>(kv_lengths);
  m.is_causal = is_causal;
  m.scale = static_cast<float>(scale);
  if (dropout_p > 0.0) {
    STD_TORCH_CHECK(seed.has_value(), "fused_rope_xattn: dropout needs a seed");
    m.seed = data_as<int64_t>(seed);
    m.keep_threshold = static_cast<uint32_t>(std::lround((1.0 - dropout_p) * 65536.0));
    m.keep_scale = dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - dropout_p)) : 0.f;
  }
  return m;
}

// positions [B|1, T, axes] or tables cos, sin [B|1, H|1, T, R/2 or R], which win.
inline void set_rotation(RotationParams& p, const OptionalTensor& positions,
                         const OptionalTensor& cos, const OptionalTensor& sin, int64_t rotary_dim,
                         bool interleaved, int64_t axes, double rope_base, bool full_width) {
  p.rotary_dim = static_cast<int32_t>(rotary_dim);
  p.axes = static_cast<int32_t>(axes);
  p.interleaved = interleaved;
  p.full_width = full_width;
  p.log2_base = std::log2(rope_base);
  if (cos.has_value()) {
    p.cos = data_as<float>(cos);
    p.sin = data_as<float>(sin);
    auto stride = [&](int axis) { return cos->size(axis) == 1 ? 0 : cos->stride(axis); };
    p.table_batch_stride = stride(0);
    p.table_head_stride = stride(1);
    p.table_token_stride = stride(2);
  } else if (positions.has_value()) {
    p.positions = positions->data_ptr();
    p.position_batch_stride = positions->size(0) == 1 ? 0 : positions->stride(0);
    switch (positions->scalar_type()) {
      case ScalarType::Int:
        p.position_type = PositionType::kInt32;
        break;
      case ScalarType::Long:
        p.position_type = PositionType::kInt64;
        break;
      case ScalarType::Float:
        p.position_type = PositionType::kFloat32;
        break;
      case ScalarType::Double:
        p.position_type = PositionType::kFloat64;
        break;
      default:
        STD_TORCH_CHECK(false, "fused_rope_xattn: positions must be int32, int64, fp32 or fp64");
    }
  }
}

}  // namespace frx
