// The operators of torch that the bindings call.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace torch::stable {

// Defined by the extension.
Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes,
                 headeronly::ScalarType type);

inline Tensor clone(const Tensor& t) { return t.attr("clone")(); }

}  // namespace torch::stable
