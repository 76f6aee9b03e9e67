// What the driver has been asked about a kernel, and told, on a device: once, not at every launch.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>

namespace frx {

// May be used from any thread.
class KernelState {
 public:
  explicit KernelState(const void* kernel) : kernel_(kernel) {}

  // Lets the kernel have that much dynamic shared memory. What it was once allowed it keeps, so
  // that no thread takes from another's launch what that one needs.
  void allow_smem(const char* name, size_t bytes);

  // As much of the L1 cache as can be becomes shared memory, so that blocks of a further kernel fit
  // beside this one's.
  void prefer_shared_memory(const char* name);

  // Whether the code that runs here was compiled with griddepcontrol.wait, and with clusters, in
  // it: PTX of an older architecture that the driver translated for this GPU was not.
  bool waits_for_previous_kernel(const char* name);

 private:
  static constexpr size_t kUnasked = 48 * 1024;  // what every kernel gets
  enum Answer { kUnknown, kNo, kYes };

  const void* const kernel_;
  std::mutex mutex_;
  std::atomic<size_t> smem_bytes_{kUnasked};
  std::atomic<bool> prefers_smem_{false};
  std::atomic<Answer> waits_{kUnknown};
};

// That of a kernel on the current device, whose answers and settings no other device shares.
KernelState& state_of_kernel(const void* kernel);

}  // namespace frx
