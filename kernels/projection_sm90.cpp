// Host side of the grouped Hopper projections: which tile, and which kernel has it.
#include "projection_sm90.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "device.h"

namespace frx {

void run_projections_sm90(ProjectionGroup90 group, int tile, CUstream_st* stream) {
  for (int i = 0; i < group.count; ++i) {
    if (const char* obstacle = projection_sm90_obstacle(group.dtype, group.members[i])) {
      throw std::runtime_error(std::string("fused_rope_xattn: ") + obstacle);
    }
  }
  put_in_launch_order(group);
  if (group.count == 0) return;
  const int num_sms = current_gpu().num_sms;
  const bool is_chosen =
      tile >= 0 && tile < kNumProjectionTiles && can_take(kProjectionTiles[tile], group);
  if (!is_chosen) tile = choose_projection_tile(group, num_sms);
  if (tile < 0) {
    throw std::runtime_error("fused_rope_xattn: projections have more tiles than an index counts");
  }
  const ProjectionPlan plan = plan_projections(group, num_sms, tile);
  if (group.dtype == DType::kTF32) return projections_sm90_tf32(group, plan, stream);
  switch (kProjectionTiles[tile].rows) {
    case 192:
      return projections_sm90_m192(group, plan, stream);
    case 128:
      return projections_sm90_m128(group, plan, stream);
    default:
      return projections_sm90_m64(group, plan, stream);
  }
}

}  // namespace frx
