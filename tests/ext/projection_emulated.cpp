// The grouped projections' kernel on the host, on raw addresses: tests/test_projection_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>

namespace frx {
// The array that the kernel declares as extern __shared__.
__align__(1024) unsigned char smem_bytes[hopper::kSmemBytes];
}  // namespace frx

#include "projection_m128_sm90.cu"
#include "projection_m192_sm90.cu"
#include "projection_m64_sm90.cu"
#include "projection_sm90.cpp"
#include "projection_tf32_sm90.cu"

namespace py = pybind11;

namespace frx {
namespace {

template <class T>
T field(const py::dict& fields, const char* name) {
  return fields.contains(name) ? fields[name].cast<T>() : T{};
}

void* address(const py::dict& fields, const char* name) {
  return reinterpret_cast<void*>(field<uintptr_t>(fields, name));
}

GroupedProjection projection_of(const py::dict& fields) {
  GroupedProjection p{};
  p.x = address(fields, "x");
  p.weight = address(fields, "weight");
  p.bias = address(fields, "bias");
  p.out = address(fields, "out");
  p.rows = field<int>(fields, "rows");
  p.tokens = field<int>(fields, "tokens");
  p.columns = field<int>(fields, "columns");
  p.depth = field<int>(fields, "depth");
  p.head_dim = field<int>(fields, "head_dim");
  RotationParams& r = p.rotation;
  r.rotary_dim = field<int>(fields, "rotary_dim");
  r.axes = field<int>(fields, "axes");
  r.interleaved = field<bool>(fields, "interleaved");
  r.full_width = field<bool>(fields, "full_width");
  r.log2_base = field<double>(fields, "log2_base");
  r.position_type = static_cast<PositionType>(field<int>(fields, "position_type"));
  r.positions = address(fields, "positions");
  r.position_batch_stride = field<int64_t>(fields, "position_batch_stride");
  r.cos = static_cast<const float*>(address(fields, "cos"));
  r.sin = static_cast<const float*>(address(fields, "sin"));
  r.table_batch_stride = field<int64_t>(fields, "table_batch_stride");
  r.table_head_stride = field<int64_t>(fields, "table_head_stride");
  r.table_token_stride = field<int64_t>(fields, "table_token_stride");
  return p;
}

void project(const py::list& members, int dtype, int tile, int num_sms, unsigned seed) {
  hopper::smem = smem_bytes;
  hopper::seed() = seed;
  emulated_sms() = num_sms;
  // Whatever is read may come from the kernel before.
  hopper::previous().end = reinterpret_cast<const char*>(UINTPTR_MAX);
  hopper::says_so_last = hopper::arrives_last = true;
  ProjectionGroup90 group{};
  group.dtype = static_cast<DType>(dtype);
  for (const py::handle& member : members) {
    const py::dict fields = member.cast<py::dict>();
    GroupedProjection& p = group.members[group.count++] = projection_of(fields);
    if (!fields.contains("transposed")) continue;
    p.is_transposed = true;
    group.transposed = {static_cast<float*>(address(fields, "transposed")),
                        static_cast<const int32_t*>(address(fields, "lengths")),
                        static_cast<const bool*>(address(fields, "keep"))};
  }
  run_projections_sm90(group, tile, nullptr);
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(projection_emulated, m) { m.def("project", &frx::project); }
