#include "projection_sm90.cuh"

namespace frx {

void projections_sm90_m128(const ProjectionGroup90& group, const ProjectionPlan& plan,
                           CUstream_st* stream) {
  static_assert(kProjectionTiles[1].rows == 128);
  dispatch_projections_sm90<1>(group, plan, stream);
}

}  // namespace frx
