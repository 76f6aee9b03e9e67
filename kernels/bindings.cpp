// The extension module, and what it tells about itself. The operators are in bindings_cuda.cpp,
// which a build without CUDA leaves out.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <string>

#ifdef USE_CUDA
#include <cuda_runtime.h>  // defines: CUDART_VERSION
#define FRX_CUDA_VERSION CUDART_VERSION
#else
#define FRX_CUDA_VERSION 0
#define FRX_ARCHS ""
#endif

namespace {

// JSON; read by _loader.build_info(). cuda is 1000 * major + 10 * minor, 0 in a CPU-only build.
std::string build_info() {
  return "{\"cuda\": " + std::to_string(FRX_CUDA_VERSION) + ", \"archs\": \"" + FRX_ARCHS +
         "\", \"torch_target\": " + std::to_string(TORCH_TARGET_VERSION >> 48) +
         ", \"kernel_hash\": \"" + FRX_KERNEL_HASH + "\"}";
}

PyModuleDef_Slot no_slots[] = {{0, nullptr}};
PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, no_slots, nullptr, nullptr, nullptr};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&module_definition); }

STABLE_TORCH_LIBRARY_IMPL(fused_rope_xattn, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}
