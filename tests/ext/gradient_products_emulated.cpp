// The gradient products' kernel on the host, on raw addresses:
// tests/test_gradient_products_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

namespace frx {
// The array that the kernel declares as extern __shared__.
__align__(1024) unsigned char smem_bytes[hopper::kSmemBytes];
}  // namespace frx

#include "gradient_products_sm90.cu"

namespace frx {
namespace {

using Term = std::tuple<uintptr_t, uintptr_t, int>;                        // left, right, depth
using Product = std::tuple<uintptr_t, int, int, bool, std::vector<Term>>;  // out, rows, columns

GradientGroup90 group_of(const std::vector<Product>& products, int dtype) {
  GradientGroup90 group{};
  group.dtype = static_cast<DType>(dtype);
  for (const auto& [out, rows, columns, over_tokens, terms] : products) {
    GradientProduct& p = group.products[group.num_products++];
    p.out = reinterpret_cast<void*>(out);
    p.rows = rows;
    p.columns = columns;
    p.over_tokens = over_tokens;
    p.first_term = group.num_terms;
    for (const auto& [left, right, depth] : terms) {
      GradientTerm& term = group.terms[group.num_terms++];
      term.left = reinterpret_cast<void*>(left);
      term.right = reinterpret_cast<void*>(right);
      term.depth = depth;
      term.left_stride = over_tokens ? rows : depth;
      term.right_stride = columns;
    }
    p.end_term = group.num_terms;
  }
  return group;
}

void multiply_all(const std::vector<Product>& products, int dtype, unsigned seed) {
  hopper::smem = smem_bytes;
  hopper::seed() = seed;
  run_gradient_products_sm90(group_of(products, dtype), nullptr);
}

std::string obstacle(const std::vector<Product>& products, int dtype) {
  const char* found = gradient_products_obstacle(group_of(products, dtype));
  return found == nullptr ? "" : found;
}

// Of each product that has results: its rows, its steps and its first tile; then all tiles.
std::pair<std::vector<std::tuple<int, int, int>>, int64_t> plan(
    const std::vector<Product>& products) {
  GradientGroup90 group = group_of(products, static_cast<int>(DType::kBFloat16));
  const int64_t tiles = plan_gradient_products(group);
  std::vector<std::tuple<int, int, int>> order;
  for (int i = 0; i < group.num_products; ++i) {
    const GradientProduct& p = group.products[i];
    order.emplace_back(p.rows, p.steps, p.first_tile);
  }
  return {order, tiles};
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(gradient_products_emulated, m) {
  m.def("multiply", &frx::multiply_all);
  m.def("obstacle", &frx::obstacle);
  m.def("plan", &frx::plan);
}
