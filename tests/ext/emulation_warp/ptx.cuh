// The instructions of ptx.cuh on the emulator: what a warp does together, its lanes meet for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - hopper::smem;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) { return __int_as_float(static_cast<int>(bits)); }

namespace frx {

inline int opaque(int x) { return x; }
template <class Char>
Char* settled(Char* address) {
  return address;
}
inline void sync_threads(int id, int threads) {
  hopper::show_copies();
  hopper::meet(hopper::block().named[id], threads);
}
inline float exp2_approx(float x) { return std::exp2(x); }

// A copy lands at once, or only at the barrier after its thread has waited for it: a buffer must be
// free for the first, and is not full before the second. Of what the kernel before has not finished
// it brings NaN.
inline void copy_async_16(uint32_t smem, const void* gmem, bool exists) {
  static std::mt19937 dice;
  if (exists) hopper::check_read(gmem, 16);
  const bool is_early = exists && hopper::is_unfinished(gmem);
  const auto copy = [=] {
    if (smem % 16 != 0 || reinterpret_cast<uintptr_t>(gmem) % 16 != 0) {
      throw std::runtime_error("a copy is not aligned");
    }
    unsigned char* const target = hopper::smem + smem;
    exists && !is_early ? std::memcpy(target, gmem, 16)
                        : std::memset(target, is_early ? 0xFF : 0, 16);
  };
  if (dice() % 2 == 0) return copy();
  hopper::self().open_group.push_back(copy);
}
inline void copy_async_16(uint32_t smem, const void* gmem) { copy_async_16(smem, gmem, true); }
inline void copy_async_16(void* smem, const void* gmem, bool exists) {
  copy_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(smem)), gmem, exists);
}

inline void commit_copies() {
  hopper::Fiber& fiber = hopper::self();
  fiber.groups.push_back(std::move(fiber.open_group));
  fiber.open_group.clear();
}

template <int kPending>
void wait_copies() {
  auto& groups = hopper::self().groups;
  auto& unseen = hopper::self().unseen;
  while (groups.size() > kPending) {
    unseen.insert(unseen.end(), groups.front().begin(), groups.front().end());
    groups.erase(groups.begin());
  }
}

// What the lanes of each warp brought to the instruction that they execute together.
inline std::array<uint32_t, 6>& brought_by(int thread) { return hopper::block().brought[thread]; }
inline int first_of_warp() { return hopper::block().running / hopper::kWarp * hopper::kWarp; }
inline int own_lane() { return hopper::block().running % hopper::kWarp; }

inline uint32_t half_word(uint32_t address) {
  uint16_t half;
  std::memcpy(&half, hopper::smem + address, sizeof(half));
  return half;
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  brought_by(hopper::block().running)[0] = address;
  hopper::sync_warp();
  const int first = first_of_warp(), g = own_lane() / 4, t = own_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const auto row = [&](int n) { return brought_by(first + 8 * i + n)[0]; };
    r[i] = transposed ? half_word(row(2 * t) + 2 * g) | half_word(row(2 * t + 1) + 2 * g) << 16
                      : half_word(row(g) + 4 * t) | half_word(row(g) + 4 * t + 2) << 16;
  }
  hopper::sync_warp();
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  load_matrices(r, address, true);
}

inline float half_of(uint32_t word, int half, __nv_bfloat16) {
  return __bfloat162float({static_cast<uint16_t>(word >> 16 * half)});
}
inline float half_of(uint32_t word, int half, __half) {
  const uint16_t bits = static_cast<uint16_t>(word >> 16 * half);
  __half x;
  std::memcpy(&x, &bits, sizeof(bits));
  return __half2float(x);
}

template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  brought_by(hopper::block().running) = {a[0], a[1], a[2], a[3], b0, b1};
  hopper::sync_warp();
  const int first = first_of_warp(), g = own_lane() / 4, t = own_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2, late = k / 8;
      const uint32_t left = brought_by(first + 4 * g + from)[2 * late + i / 2];
      const uint32_t right = brought_by(first + 4 * column + from)[4 + late];
      c[i] += half_of(left, k % 2, T()) * half_of(right, k % 2, T());
    }
  }
  hopper::sync_warp();
}

inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  brought_by(hopper::block().running) = {a[0], a[1], a[2], a[3], b0, b1};
  hopper::sync_warp();
  const int first = first_of_warp(), g = own_lane() / 4, t = own_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 8; ++k) {
      const uint32_t left = brought_by(first + 4 * g + k % 4)[k / 4 * 2 + i / 2];
      const uint32_t right = brought_by(first + 4 * (2 * t + i % 2) + k % 4)[4 + k / 4];
      c[i] += __uint_as_float(left) * __uint_as_float(right);
    }
  }
  hopper::sync_warp();
}

inline uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, hopper::smem + address, sizeof(word));
  return word;
}

// To 10 bits of fraction, ties to even.
inline uint32_t round_to_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7FFFFFFFu : (bits + 0xFFFu + (bits >> 13 & 1)) & 0xFFFFE000u;
}

}  // namespace frx
