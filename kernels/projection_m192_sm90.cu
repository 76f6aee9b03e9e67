#include "projection_sm90.cuh"

namespace frx {

void projections_sm90_m192(const ProjectionGroup90& group, const ProjectionPlan& plan,
                           CUstream_st* stream) {
  static_assert(kProjectionTiles[0].rows == 192);
  dispatch_projections_sm90<0>(group, plan, stream);
}

}  // namespace frx
