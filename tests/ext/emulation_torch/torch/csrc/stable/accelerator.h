#pragma once

#include <cstdint>

namespace torch::stable::accelerator {

struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

}  // namespace torch::stable::accelerator
