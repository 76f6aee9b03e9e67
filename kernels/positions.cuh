// Positions of tokens, whatever the type they come in.
#pragma once

#include "host_device.h"
#include "params.h"

namespace frx {

// In fp64, which holds every position that the kernels take.
FRX_HOST_DEVICE double position_of(const RotationParams& r, int64_t batch, int64_t token,
                                   int axis) {
  const int64_t index = batch * r.position_batch_stride + token * r.axes + axis;
  switch (r.position_type) {
    case PositionType::kInt32:
      return static_cast<const int32_t*>(r.positions)[index];
    case PositionType::kInt64:
      return static_cast<double>(static_cast<const int64_t*>(r.positions)[index]);
    case PositionType::kFloat32:
      return static_cast<const float*>(r.positions)[index];
    case PositionType::kFloat64:
      return static_cast<const double*>(r.positions)[index];
    default:
      return static_cast<double>(token);
  }
}

}  // namespace frx
