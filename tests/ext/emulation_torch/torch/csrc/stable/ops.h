// The operators of torch that the bindings call.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace torch::stable {

inline Tensor clone(const Tensor& t) { return t.attr("clone")(); }

}  // namespace torch::stable
