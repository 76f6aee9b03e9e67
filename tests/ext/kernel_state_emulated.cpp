// What is remembered of kernels, over a driver that notes what it is asked:
// tests/test_kernel_state.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.h"
#include "kernel_state.cpp"

namespace py = pybind11;

namespace frx {

Gpu current_gpu() { return {driver::capability, 1}; }

namespace {

KernelState& state(uintptr_t kernel) {
  return state_of_kernel(reinterpret_cast<const void*>(kernel));
}

// kernel: an index of the PTX versions. Returns what the driver was asked meanwhile.
template <class Call>
std::vector<std::string> asked(Call call) {
  driver::asked.clear();
  call();
  return driver::asked;
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(kernel_state_emulated, m) {
  m.def("set_gpu", [](int device, int capability, int version, std::vector<int> ptx_versions) {
    driver::device = device;
    driver::capability = capability;
    driver::version = version;
    driver::ptx_versions = std::move(ptx_versions);
  });
  m.def("waits",
        [](uintptr_t kernel) { return frx::state(kernel).waits_for_previous_kernel("kernel"); });
  m.def("allow_smem", [](uintptr_t kernel, size_t bytes) {
    return frx::asked([&] { frx::state(kernel).allow_smem("kernel", bytes); });
  });
  m.def("prefer_shared_memory", [](uintptr_t kernel) {
    return frx::asked([&] { frx::state(kernel).prefer_shared_memory("kernel"); });
  });
  m.def("ask_whether_waits", [](uintptr_t kernel) {
    return frx::asked([&] { frx::state(kernel).waits_for_previous_kernel("kernel"); });
  });
}
