// Dropout draws in bulk, one bit a weight, for kernels that hold the accumulators of
// wgmma_sm90.cuh. The mask is that of dropout.cuh.
//
// A thread's weights come in pairs of neighbouring columns: pair 2n + r is columns 8n + 2t and 8n +
// 2t + 1 of row g + 8r. Bit i % 16 of the low and of the high half of word i / 16 says that the
// first and the second weight of pair i are dropped.
#pragma once

#include <cstdint>

#include "dropout.cuh"
#include "host_device.h"

namespace frx {

// ---- from draws to bits -----------------------------------------------------------------------

// A draw is dropped when min(max(draw, floor) + shift, 1) is 1, in 16 bits. Both halves are alike.
struct DropTest {
  uint32_t floor, shift;
};

FRX_HOST_DEVICE DropTest drop_test(uint32_t keep_threshold) {
  if (keep_threshold == 0) return {0xFFFFFFFFu, 0};
  const uint32_t floor = keep_threshold - 1;  // the largest draw that is kept
  return {floor * 0x10001u, ((0x10000u - floor) & 0xFFFFu) * 0x10001u};
}

// 1 in each half of the result whose draw is dropped, else 0.
FRX_HOST_DEVICE uint32_t dropped_flags(uint32_t draws, DropTest test) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t flags;
  asm("{\n"
      ".reg .b32 x;\n"
      "max.u16x2 x, %1, %2;\n"
      "add.u16x2 x, x, %3;\n"
      "min.u16x2 %0, x, %4;\n"
      "}"
      : "=r"(flags)
      : "r"(draws), "r"(test.floor), "r"(test.shift), "r"(0x10001u));
  return flags;
#else
  uint32_t flags = 0;
  for (int at = 0; at < 32; at += 16) {
    const uint32_t draw = draws >> at & 0xFFFFu, floor = test.floor >> at & 0xFFFFu;
    const uint32_t moved = ((draw > floor ? draw : floor) + (test.shift >> at)) & 0xFFFFu;
    flags |= (moved < 1 ? moved : 1u) << at;
  }
  return flags;
#endif
}

// ---- draws of a thread ------------------------------------------------------------------------

// What all draws of a thread for one (batch, head) share. kTransposed: rows are keys and columns
// queries, instead of the reverse.
//
// A Philox call serves 16 columns: keys 2t, 2t + 1, 2t + 8, 2t + 9 of queries g and g + 8. That is
// what a thread holds of 16 columns whose rows are queries. If rows are keys, threads of keys g and
// g ^ 1 hold the weights of two calls between them, those of queries 2t and of queries 2t + 1: each
// makes one, and they exchange halves.
template <bool kTransposed>
struct DropoutLane {
  uint32_t seed_low, seed_high;
  uint32_t batch_head;
  uint32_t corner;  // see dropout_counter
  DropTest test;

  // (g, t): which fragment of a warp's tile the thread holds.
  FRX_HOST_DEVICE DropoutLane(uint64_t seed, uint64_t batch_head, uint32_t keep_threshold, int g,
                              int t)
      : seed_low(static_cast<uint32_t>(seed)),
        seed_high(static_cast<uint32_t>(seed >> 32)),
        batch_head(static_cast<uint32_t>(batch_head)),
        corner(dropout_counter(batch_head, kTransposed ? 2 * t + g % 2 : g, kTransposed ? g : 2 * t)
                   .w[3]),
        test(drop_test(keep_threshold)) {}

  // One word of bits, for 16 * kCalls columns, from the thread's own calls: the final one if rows
  // are queries, else for exchange_bits. Blocks of rows and of columns count in sixteens.
  template <int kCalls>
  FRX_HOST_DEVICE uint32_t draw_bits(uint32_t row_block, uint32_t column_block) const {
    static_assert(kCalls >= 1 && kCalls <= 4);
    PhiloxWords words[kCalls];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int c = 0; c < kCalls; ++c) {
      words[c] = {{kTransposed ? row_block : column_block + c,
                   kTransposed ? column_block + c : row_block, batch_head, corner}};
    }
    philox(words, seed_low, seed_high);
    uint32_t bits = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int pair = 4 * kCalls - 1; pair >= 0; --pair) {
      // Word 2i + j of a call belongs to queries 8i on and keys 8j on, pair 2i + j to columns 8i
      // on.
      const int word = kTransposed ? pair % 4 : pair % 2 * 2 + pair / 2 % 2;
      bits = 2 * bits + dropped_flags(words[pair / 4].w[word], test);
    }
    return bits;
  }
};

// Rows are keys: the bits of key g from those that the threads of keys g and g ^ 1 drew.
FRX_HOST_DEVICE uint32_t exchange_bits(uint32_t own, uint32_t other, int g) {
  return g % 2 == 0 ? (own & 0xFFFFu) | other << 16 : (own & 0xFFFF0000u) | other >> 16;
}

// How many calls fill a word, for so many columns: a divisor, as large as possible.
constexpr int dropout_word_calls(int columns, int limit) {
  int calls = limit;
  while (columns / 16 % calls != 0) --calls;
  return calls;
}

// The bits of a thread's weights in kColumns columns. Pair i is bit i % kPairs of word i / kPairs.
// kMaxCalls are drawn at once, each taking four registers meanwhile.
template <int kColumns, int kMaxCalls = 4>
struct DropoutBits {
  static_assert(kColumns % 16 == 0);
  static constexpr int kCalls = dropout_word_calls(kColumns, kMaxCalls);
  static constexpr int kPairs = 4 * kCalls;
  static constexpr int kWords = kColumns / 4 / kPairs;
  uint32_t words[kWords];

#ifdef __CUDACC__
  // A loop that is not unrolled: the compiler would move draws away from where they are written,
  // between the issue of a product and the wait for it.
  template <bool kTransposed>
  __device__ __forceinline__ void draw(const DropoutLane<kTransposed>& lane, uint32_t row_block,
                                       uint32_t column_block) {
    int words_left = kWords;
    asm volatile("" : "+r"(words_left));  // or it unrolls a single turn
#pragma unroll 1
    do {
      uint32_t bits = lane.template draw_bits<kCalls>(row_block, column_block);
      if constexpr (kTransposed) {
        bits = exchange_bits(bits, __shfl_xor_sync(0xffffffff, bits, 4), threadIdx.x / 4);
      }
#pragma unroll
      for (int i = 1; i < kWords; ++i) words[i - 1] = words[i];
      words[kWords - 1] = bits;
      asm volatile("" : "+r"(words[kWords - 1]));
      column_block += kCalls;
    } while (--words_left > 0);
  }

  // 0x8000 in the halves of the result whose weight of the pair is dropped; other bits are noise.
  __device__ __forceinline__ uint32_t signs(int pair) const {
    return words[pair / kPairs] << (15 - pair % kPairs);
  }
  __device__ __forceinline__ bool is_dropped(int pair, int odd) const {
    return words[pair / kPairs] >> (pair % kPairs + 16 * odd) & 1;
  }
#endif
};

}  // namespace frx
