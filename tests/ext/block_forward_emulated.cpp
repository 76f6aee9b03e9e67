// The kernels of a small block's forward on the host, on raw addresses:
// tests/test_block_forward_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace frx {
// The array that the kernels declare as extern __shared__.
__align__(1024) char smem[hopper::kSmemBytes];
}  // namespace frx

#include "block_forward.cuh"

namespace py = pybind11;

namespace frx {
namespace {

// By name: the address of a tensor and its strides.
using Tensors = std::map<std::string, std::pair<uintptr_t, std::vector<int64_t>>>;
// Addresses and sizes in bytes.
using Ranges = std::vector<std::pair<uintptr_t, int64_t>>;

template <class T>
T* at(const Tensors& tensors, const char* name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : reinterpret_cast<T*>(found->second.first);
}

int64_t stride(const Tensors& tensors, const char* name, int dim) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? 0 : found->second.second[dim];
}

HeadsView heads_view(const Tensors& tensors, const char* name) {
  return {at<void>(tensors, name), stride(tensors, name, 0), stride(tensors, name, 1),
          stride(tensors, name, 2)};
}

ScoresView scores_view(const Tensors& tensors, const char* name) {
  return {at<void>(tensors, name), stride(tensors, name, 0), stride(tensors, name, 1),
          stride(tensors, name, 2), stride(tensors, name, 3)};
}

std::vector<hopper::Range> ranges_of(const Ranges& ranges) {
  std::vector<hopper::Range> all;
  for (const auto& [address, bytes] : ranges) {
    const char* begin = reinterpret_cast<const char*>(address);
    all.push_back({begin, begin + bytes});
  }
  return all;
}

// copied: what copies may read; unfinished: what the kernel before writes of that.
void prepare(unsigned seed, const Ranges& copied, const Ranges& unfinished) {
  hopper::smem = reinterpret_cast<unsigned char*>(smem);
  hopper::seed() = seed;
  hopper::readable() = ranges_of(copied);
  hopper::written_in_chain() = ranges_of(unfinished);
  hopper::says_so_last = true;
}

// sizes: rows, columns, depth, log2 of the head dim, tokens; rotation: rotary_dim, axes,
// interleaved, full_width, type of the positions.
ProjectionParams projection_of(const std::vector<int>& sizes, const std::vector<int>& rotation,
                               double log2_base, const Tensors& tensors) {
  ProjectionParams p{};
  p.x = at<void>(tensors, "x");
  p.weight = at<void>(tensors, "weight");
  p.bias = at<void>(tensors, "bias");
  p.out = at<void>(tensors, "out");
  p.rows = sizes[0];
  p.columns = sizes[1];
  p.depth = sizes[2];
  p.head_shift = sizes[3];
  p.tokens = make_divisor(sizes[4]);
  BlockRotation& r = p.rotation;
  r.rotary_dim = rotation[0];
  r.axes = rotation[1];
  r.interleaved = rotation[2] != 0;
  r.full_width = rotation[3] != 0;
  r.position_type = static_cast<PositionType>(rotation[4]);
  r.log2_base = log2_base;
  r.positions = at<void>(tensors, "positions");
  r.position_batch_stride = stride(tensors, "positions", 0);
  r.cos = at<float>(tensors, "cos");
  r.sin = at<float>(tensors, "sin");
  r.table_batch_stride = stride(tensors, "cos", 0);
  r.table_head_stride = stride(tensors, "cos", 1);
  r.table_token_stride = stride(tensors, "cos", 2);
  plan_rotation(r);
  return p;
}

template <class Op>
void project(const ProjectionGroup& group, int head_columns) {
  switch (head_columns) {
    case 32:
      return launch_projections<Op, 32>(group, nullptr);
    case 64:
      return launch_projections<Op, 64>(group, nullptr);
    default:
      return launch_projections<Op, 128>(group, nullptr);
  }
}

// tile: rows and columns of one, and columns of the tiles as wide as a head.
void run_projections(const std::string& dtype, const std::vector<ProjectionParams>& members,
                     const std::vector<int>& tile, bool follows_kernel, const Ranges& copied,
                     const Ranges& unfinished, unsigned seed) {
  prepare(seed, copied, unfinished);
  hopper::says_so_last = !follows_kernel;  // the last kernel of a call says so at once
  ProjectionGroup group{};
  group.tile_rows = tile[0];
  group.tile_columns = tile[1];
  group.follows_kernel = follows_kernel;
  for (const ProjectionParams& member : members) {
    ProjectionParams& p = group.members[group.count];
    p = member;
    p.column_tiles = make_divisor(ceil_div(p.columns, group.tile_columns));
    group.tiles[group.count++] =
        static_cast<int32_t>(projection_tiles(p, group.tile_rows, group.tile_columns));
  }
  if (dtype == "bf16") return project<HalfOp<__nv_bfloat16>>(group, tile[2]);
  if (dtype == "fp16") return project<HalfOp<__half>>(group, tile[2]);
  if (dtype == "fp32") return project<Bf16x6Op>(group, tile[2]);
  project<Tf32Op<1>>(group, tile[2]);
}

template <class Op>
void attend(const BlockAttentionParams& p) {
  const int head_dim = p.attention.sizes.head_dim;
  if (head_dim <= 32) return launch_attention<Op, 32>(p, nullptr);
  if (head_dim <= 64) return launch_attention<Op, 64>(p, nullptr);
  launch_attention<Op, 128>(p, nullptr);
}

// sizes: B, Tq, Tk, H, Hkv, D. The bias is fp32. num_sms: of a GPU that has clusters; 0: of
// another.
void run_attention(const std::string& dtype, const std::vector<int>& sizes, const Tensors& tensors,
                   float scale, bool is_causal, bool has_finished_keys, const Ranges& copied,
                   const Ranges& unfinished, unsigned seed, int num_sms) {
  prepare(seed, copied, unfinished);
  emulated_sms() = num_sms;
  hopper::has_clusters() = num_sms > 0;
  BlockAttentionParams block{};
  AttentionForwardParams& p = block.attention;
  p.sizes = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
  p.q = heads_view(tensors, "q");
  p.k = heads_view(tensors, "k");
  p.v = heads_view(tensors, "v");
  p.o = heads_view(tensors, "o");
  p.lse = at<float>(tensors, "lse");
  p.scores.bias = scores_view(tensors, "attn_bias");
  p.scores.keep_mask = scores_view(tensors, "keep_mask");
  p.scores.key_keep = at<bool>(tensors, "key_keep");
  p.scores.kv_lengths = at<int32_t>(tensors, "kv_lengths");
  p.scores.is_causal = is_causal;
  p.scores.scale = scale;
  block.has_finished_keys = has_finished_keys;
  block.query_tiles = make_divisor(ceil_div(sizes[1], kBlockTileQueries));
  block.heads = make_divisor(sizes[3]);
  block.heads_a_kv_head = make_divisor(sizes[3] / sizes[4]);
  if (dtype == "bf16") return attend<HalfOp<__nv_bfloat16>>(block);
  if (dtype == "fp16") return attend<HalfOp<__half>>(block);
  if (dtype == "fp32") return attend<Tf32Op<4>>(block);
  attend<Tf32Op<1>>(block);
}

}  // namespace

PYBIND11_MODULE(block_forward_emulated, m) {
  py::class_<ProjectionParams>(m, "Projection").def(py::init(&projection_of));
  m.def("project", &run_projections);
  m.def("attend", &run_attention);
  // Rows of the tiles for a head of so many columns, from the lowest to the highest.
  m.def("tile_rows", [](int columns) {
    return std::vector<int>{kBlockLowTile, kBlockMiddleTile, block_high_tile(columns)};
  });
  m.attr("narrow_columns") = kBlockNarrowColumns;
}

}  // namespace frx
