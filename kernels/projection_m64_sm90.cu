#include "projection_sm90.cuh"

namespace frx {

void projections_sm90_m64(const ProjectionGroup90& group, const ProjectionPlan& plan,
                          CUstream_st* stream) {
  static_assert(kProjectionTiles[2].rows == 64 && kProjectionTiles[4].rows == 64);
  switch (plan.tile) {
    case 2:
      return dispatch_projections_sm90<2>(group, plan, stream);
    case 3:
      return dispatch_projections_sm90<3>(group, plan, stream);
    default:
      return dispatch_projections_sm90<4>(group, plan, stream);
  }
}

}  // namespace frx
