// Operators that the bindings register become functions of a Python module, with positional
// arguments only, once the extension calls define_<name of the library>.
#pragma once

#include <pybind11/pybind11.h>

namespace torch::stable {

struct Library {
  pybind11::module_& module;

  template <class Function>
  void impl(const char* name, Function function) {
    module.def(name, function);
  }
};

}  // namespace torch::stable

#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) void define_##name(torch::stable::Library m)
#define TORCH_BOX(function) function
