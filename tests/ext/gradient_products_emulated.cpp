// The gradient products' kernel on the host, on raw addresses:
// tests/test_gradient_products_kernel.py.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
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

// num_sms: of the GPU that the launch is planned for. Parts start as NaN.
void multiply_all(const std::vector<Product>& products, int dtype, int num_sms, unsigned seed) {
  hopper::smem = smem_bytes;
  hopper::seed() = seed;
  GradientGroup90 group = group_of(products, dtype);
  plan_gradient_products(group, num_sms);
  std::vector<std::vector<float>> parts;
  for (int i = 0; i < group.num_products; ++i) {
    parts.emplace_back(gradient_part_floats(group.products[i]), std::nanf(""));
    group.products[i].parts = parts.back().data();
  }
  run_gradient_products_sm90(group, nullptr);
}

std::string obstacle(const std::vector<Product>& products, int dtype) {
  const char* found = gradient_products_obstacle(group_of(products, dtype));
  return found == nullptr ? "" : found;
}

// Of each product that has results: its rows, its steps, the blocks that share them, and its first
// block; then all blocks.
std::pair<std::vector<std::tuple<int, int, int, int>>, int> plan(
    const std::vector<Product>& products, int num_sms) {
  GradientGroup90 group = group_of(products, static_cast<int>(DType::kBFloat16));
  plan_gradient_products(group, num_sms);
  std::vector<std::tuple<int, int, int, int>> order;
  for (int i = 0; i < group.num_products; ++i) {
    const GradientProduct& p = group.products[i];
    order.emplace_back(p.rows, p.steps, p.splits, p.first_block);
  }
  return {order, group.num_blocks};
}

}  // namespace
}  // namespace frx

PYBIND11_MODULE(gradient_products_emulated, m) {
  m.def("multiply", &frx::multiply_all);
  m.def("obstacle", &frx::obstacle);
  m.def("plan", &frx::plan);
}
