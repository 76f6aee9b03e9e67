#include "projection_sm90.cuh"

namespace frx {

void projections_sm90_tf32(const ProjectionGroup90& group, const ProjectionPlan& plan,
                           CUstream_st* stream) {
  switch (plan.tile) {
    case 1:
      return launch_projections_sm90<1, Tf32>(group, plan, stream);
    case 2:
      return launch_projections_sm90<2, Tf32>(group, plan, stream);
    case 3:
      return launch_projections_sm90<3, Tf32>(group, plan, stream);
    default:
      return launch_projections_sm90<4, Tf32>(group, plan, stream);
  }
}

}  // namespace frx
