// torch::stable::Tensor as the bindings use it, around a tensor of Python's.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch::stable {

class Tensor : public pybind11::object {
 public:
  PYBIND11_OBJECT_DEFAULT(Tensor, object, is_tensor)

  explicit Tensor(AtenTensorHandle made) : object(made, stolen_t{}) {}

  void* data_ptr() const { return reinterpret_cast<void*>(attr("data_ptr")().cast<uintptr_t>()); }
  std::vector<int64_t> sizes() const { return attr("shape").cast<std::vector<int64_t>>(); }
  int64_t size(int dim) const { return attr("size")(dim).cast<int64_t>(); }
  int64_t stride(int dim) const { return attr("stride")(dim).cast<int64_t>(); }
  int32_t get_device_index() const { return 0; }
  headeronly::ScalarType scalar_type() const {
    const std::string name = pybind11::str(attr("dtype"));
    int type = 0;
    while (name != std::string("torch.") + headeronly::kTypeNames[type]) ++type;
    return static_cast<headeronly::ScalarType>(type);
  }

 private:
  static bool is_tensor(PyObject* object) { return PyObject_HasAttrString(object, "data_ptr"); }
};

}  // namespace torch::stable
