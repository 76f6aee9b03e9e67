#include "device.h"

#include <dlfcn.h>

#include <array>
#include <mutex>
#include <stdexcept>

#include "cuda_check.h"

namespace frx {

Gpu current_gpu() {
  constexpr int kMaxDevices = 64;
  static std::array<Gpu, kMaxDevices> gpus;
  static std::array<std::once_flag, kMaxDevices> asked;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices) throw std::runtime_error("fused_rope_xattn: more than 64 GPUs");
  std::call_once(asked[device], [device] {
    auto attribute = [device](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
      return value;
    };
    gpus[device] = {10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                        attribute(cudaDevAttrComputeCapabilityMinor),
                    attribute(cudaDevAttrMultiProcessorCount)};
  });
  return gpus[device];
}

cudaStream_t current_stream(int32_t device_index) {
  // The symbol is in libtorch_cuda, which a CPU-only torch lacks; linking it would tie the binary
  // to one build of torch. A CUDA tensor exists here, so the library is loaded.
  using GetStream = int32_t (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device_index, &stream) != 0) {
    throw std::runtime_error("fused_rope_xattn: libtorch_cuda.so does not tell its current stream");
  }
  return static_cast<cudaStream_t>(stream);
}

}  // namespace frx
