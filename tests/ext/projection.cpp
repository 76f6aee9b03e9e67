// The grouped projections' torch-free parts, called from tests/test_projection.py: fixed-point
// angles, units of columns, the columns that share angles, and the plan.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "projection_sm90.h"
#include "turns.cuh"

namespace py = pybind11;

namespace frx {
namespace {

// rows, tokens, columns, depth, head_dim, rotary_dim, axes, interleaved
using Sizes = std::tuple<int, int, int, int, int, int, int, bool>;

GroupedProjection projection_of(const Sizes& sizes) {
  GroupedProjection p{};
  std::tie(p.rows, p.tokens, p.columns, p.depth, p.head_dim, p.rotation.rotary_dim, p.rotation.axes,
           p.rotation.interleaved) = sizes;
  return p;
}

ProjectionGroup90 group_of(const std::vector<Sizes>& members, bool has_tables) {
  ProjectionGroup90 group{};
  group.dtype = DType::kBFloat16;
  static const float table = 0;
  for (const Sizes& sizes : members) {
    GroupedProjection& p = group.members[group.count++];
    p = projection_of(sizes);
    if (has_tables) p.rotation.cos = p.rotation.sin = &table;
  }
  put_in_launch_order(group);
  return group;
}

// What a lane of the kernel finds for two columns of each chunk of a unit: their columns, and the
// pair of each of its two pairs.
py::list unit_of_lane(const Sizes& sizes, int unit, int t) {
  const GroupedProjection p = projection_of(sizes);
  py::list result;
  for (int which = 0; which < 2; ++which) {
    const bool gathered = is_gathered(p.rotation);
    const ChunkPlace own = chunk_place(p, 2 * unit + which);
    const ChunkPlace first = chunk_place(p, 2 * unit + (gathered ? 0 : which));
    const int in_chunk = gathered ? 2 * t + which : t;
    result.append(py::make_tuple(own.column + 2 * t, first.head,
                                 in_chunk < first.num_pairs ? first.pair + in_chunk : -1));
  }
  return result;
}

py::list tiles_in_order(const std::vector<Sizes>& members, int num_sms, int tile) {
  const ProjectionGroup90 group = group_of(members, false);
  const ProjectionPlan plan = plan_projections(group, num_sms, tile);
  py::list places;
  for (int index = 0; index < plan.num_tiles; ++index) {
    const TilePlace place = locate_tile(plan.schedule, group.count, index);
    places.append(py::make_tuple(place.member, place.row, place.column));
  }
  return places;
}

// Whether each member of the launch, in its order, shares angles.
std::vector<bool> members_that_share(const std::vector<Sizes>& members, int num_sms, int tile) {
  const ProjectionGroup90 group = group_of(members, false);
  const ProjectionPlan plan = plan_projections(group, num_sms, tile);
  std::vector<bool> shares;
  for (int i = 0; i < group.count; ++i) shares.push_back(plan.schedule[i].shares != 0);
  return shares;
}

// table_head_stride: negative where angles come from positions.
bool shares(const Sizes& sizes, int tile_columns, int64_t table_head_stride) {
  GroupedProjection p = projection_of(sizes);
  static const float table = 0;
  if (table_head_stride >= 0) {
    p.rotation.cos = p.rotation.sin = &table;
    p.rotation.table_head_stride = table_head_stride;
  }
  return shares_angles(p, tile_columns);
}

std::string obstacle(const Sizes& sizes, int dtype, int position_type, double log2_base,
                     uintptr_t x) {
  GroupedProjection p = projection_of(sizes);
  p.rotation.position_type = static_cast<PositionType>(position_type);
  p.rotation.log2_base = log2_base;
  p.x = reinterpret_cast<const void*>(x);
  const char* found = projection_sm90_obstacle(static_cast<DType>(dtype), p);
  return found == nullptr ? "" : found;
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(projection, m) {
  using namespace frx;
  m.def("fraction_of_turn", py::vectorize([](int64_t position, double frequency) {
          return fraction_of_turn({position, 0}, turns_a_position(frequency));
        }));
  m.def("fraction_of_turn_at", py::vectorize([](double position, double frequency) {
          return fraction_of_turn(fixed_position(position), turns_a_position(frequency));
        }));
  m.def("cos_of_turn", py::vectorize([](uint32_t turn) { return cos_sin_of_turn(turn).cos; }));
  m.def("sin_of_turn", py::vectorize([](uint32_t turn) { return cos_sin_of_turn(turn).sin; }));
  m.def("num_units", [](const Sizes& sizes) { return num_units(projection_of(sizes)); });
  m.def("chunk_column",
        [](const Sizes& sizes, int chunk) { return chunk_column(projection_of(sizes), chunk); });
  m.def("unit_of_lane", &unit_of_lane);
  m.def("shares_angles", &shares);
  m.def("shared_chunk", [](const Sizes& sizes, int tile_chunks, int chunk) {
    return shared_chunk(projection_of(sizes), tile_chunks, chunk);
  });
  m.def("tiles", [] {
    py::list tiles;
    for (const ProjectionTile& t : kProjectionTiles) {
      tiles.append(py::make_tuple(t.rows, t.columns, t.stages));
    }
    return tiles;
  });
  m.def("choose_tile", [](const std::vector<Sizes>& members, int num_sms, bool has_tables) {
    return choose_projection_tile(group_of(members, has_tables), num_sms);
  });
  m.def("tiles_in_order", &tiles_in_order);
  m.def("members_that_share", &members_that_share);
  m.def("obstacle", &obstacle);
}
