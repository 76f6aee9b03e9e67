// wgmma on the emulator: a thread computes its own fragment when it waits for its group. As on the
// GPU the lanes of a warp go through these together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <stdexcept>
#include <type_traits>

#include "tf32.h"

namespace frx {

inline void wgmma_fence() { hopper::sync_warp(); }
inline void wgmma_commit_group() {
  hopper::self().groups.push_back(std::move(hopper::self().open_group));
  hopper::self().open_group.clear();
}

template <int kPending>
void wgmma_wait_group() {
  auto& groups = hopper::self().groups;
  while (groups.size() > kPending) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  hopper::sync_warp();  // lane 0 releases the operands for its warp
}

template <class T, int kCount>
void pin_registers(T (&)[kCount]) {}

struct SmemDescriptor {
  uint32_t low, high;
  SmemDescriptor operator+(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
};

template <int kRowBytes>
SmemDescriptor swizzled_descriptor(uint32_t address, uint32_t leading_bytes) {
  static_assert(kRowBytes == 128);
  return {address >> 4 | (leading_bytes >> 4) << 16, 8 * kRowBytes >> 4 | 1u << 30};
}

inline SmemDescriptor core_descriptor(uint32_t address, uint32_t along_k, uint32_t across) {
  return {address >> 4 | (along_k >> 4) << 16, across >> 4};
}

template <class Element>
float half_of(uint32_t word) {
  const uint16_t bits = static_cast<uint16_t>(word);
  Element x;
  std::memcpy(&x, &bits, 2);
  if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}

// Element k of a row of an operand. Either k is contiguous; or rows are, 64 of them beside each
// other, the next 64 leading bytes further on. Eight of what lies across make the repeating unit.
// Without swizzle: core matrices, leading bytes apart along k and stride bytes across.
template <bool kRowsContiguous, int kBytes = 2>
uint32_t operand_address(SmemDescriptor d, int row, int k) {
  const uint32_t start = (d.low & 0x3FFF) << 4, leading = (d.low >> 16 & 0x3FFF) << 4;
  const uint32_t stride = (d.high & 0x3FFF) << 4;
  if (d.high >> 30 == 0) {
    const int line = kRowsContiguous ? k : row, within = kRowsContiguous ? row : k;
    return start + row / 8 * stride + k / 8 * leading + line % 8 * 16 + within % 8 * 2;
  }
  return hopper::swizzled(
      start + (kRowsContiguous ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                               : row / 8 * stride + row % 8 * 128 + k * kBytes));
}

template <class Element, bool kRowsContiguous>
float operand(SmemDescriptor d, int row, int k) {
  if constexpr (std::is_same_v<Element, Tf32>) {
    if (kRowsContiguous) throw std::runtime_error("a TF32 operand whose rows are contiguous");
    float x;
    std::memcpy(&x, hopper::smem + operand_address<false, 4>(d, row, k), 4);
    return x;
  } else {
    uint16_t bits;
    std::memcpy(&bits, hopper::smem + operand_address<kRowsContiguous>(d, row, k), 2);
    return half_of<Element>(bits);
  }
}

template <class Element, int kColumns>
struct Wgmma {
  static constexpr int kDepth = std::is_same_v<Element, Tf32> ? 8 : 16;

  template <bool kColumnsContiguous = false, bool kRowsContiguous = false>
  static void ss(float (&d)[kColumns / 2], SmemDescriptor a, SmemDescriptor b, bool accumulate) {
    const int thread = hopper::block().running % 128, lane = thread % 32;
    float* const out = d;
    hopper::self().open_group.push_back([=] {
      for (int i = 0; i < 2; ++i) {
        float of_a[kDepth];
        for (int k = 0; k < kDepth; ++k) {
          const int row = thread / 32 * 16 + lane / 4 + 8 * i;
          of_a[k] = operand<Element, kRowsContiguous>(a, row, k);
        }
        for (int n = 0; n < kColumns / 8; ++n) {
          for (int e = 0; e < 2; ++e) {
            float sum = accumulate ? out[4 * n + 2 * i + e] : 0.f;
            for (int k = 0; k < kDepth; ++k) {
              const int column = 8 * n + 2 * (lane % 4) + e;
              sum += of_a[k] * operand<Element, kColumnsContiguous>(b, column, k);
            }
            out[4 * n + 2 * i + e] = sum;
          }
        }
      }
    });
  }

  // The registers of a quad make up a row of the first operand.
  static void rs(float (&d)[kColumns / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                 SmemDescriptor b) {
    const int lane = hopper::block().running % 32;
    const uint32_t own[4] = {a0, a1, a2, a3};
    std::array<std::array<float, 16>, 2> a;
    for (int from = 0; from < 4; ++from) {
      for (int r = 0; r < 4; ++r) {
        const uint32_t pair = hopper::shuffle(own[r], lane / 4 * 4 + from);
        for (int half = 0; half < 2; ++half) {
          a[r % 2][r / 2 * 8 + 2 * from + half] = half_of<Element>(pair >> 16 * half);
        }
      }
    }
    float* const out = d;
    hopper::self().open_group.push_back([=] {
      for (int n = 0; n < kColumns / 8; ++n) {
        for (int e = 0; e < 2; ++e) {
          for (int k = 0; k < 16; ++k) {
            const float of_b = operand<Element, true>(b, 8 * n + 2 * (lane % 4) + e, k);
            for (int i = 0; i < 2; ++i) out[4 * n + 2 * i + e] += a[i][k] * of_b;
          }
        }
      }
    });
  }
};

}  // namespace frx
