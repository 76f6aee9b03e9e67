// The dropout mask: a pure function of (seed, batch, head, query, key).
//
// One Philox4x32-10 call yields eight 16-bit draws. They serve the eight scores that one thread
// holds of a 16 x 16 corner of the score matrix after two m16n8 tensor-core products: queries
// {r, r + 8} times keys {c, c + 1, c + 8, c + 9}. Kernels therefore draw once a group, and any
// kernel with another layout still finds the same draw by index.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace frx {

struct PhiloxWords {
  uint32_t w[4];
};

// Ten rounds of Philox4x32 (Salmon et al., SC 2011) for several counters in lockstep: one call is a
// chain of dependent instructions, too few to hide their latency.
template <int kCalls>
FRX_HOST_DEVICE void philox(PhiloxWords (&counters)[kCalls], uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  constexpr int kRounds = 10;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int call = 0; call < kCalls; ++call) {
      const PhiloxWords counter = counters[call];
      const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * counter.w[0];
      const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * counter.w[2];
      counters[call] = {{static_cast<uint32_t>(product1 >> 32) ^ counter.w[1] ^ key0,
                         static_cast<uint32_t>(product1),
                         static_cast<uint32_t>(product0 >> 32) ^ counter.w[3] ^ key1,
                         static_cast<uint32_t>(product0)}};
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

FRX_HOST_DEVICE PhiloxWords philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  PhiloxWords counters[1] = {counter};
  philox(counters, key0, key1);
  return counters[0];
}

// The counter of the group that holds (query, key). batch_head = b * H + h.
FRX_HOST_DEVICE PhiloxWords dropout_counter(uint64_t batch_head, uint32_t query, uint32_t key) {
  const uint32_t within_corner = ((key >> 1) & 3u) | ((query & 7u) << 2);
  const uint32_t batch_head_high = static_cast<uint32_t>(batch_head >> 32);
  return {{key >> 4, query >> 4, static_cast<uint32_t>(batch_head),
           within_corner | (batch_head_high << 5)}};
}

// The draws of that group.
FRX_HOST_DEVICE PhiloxWords dropout_words(uint64_t seed, uint64_t batch_head, uint32_t query,
                                          uint32_t key) {
  return philox(dropout_counter(batch_head, query, key), static_cast<uint32_t>(seed),
                static_cast<uint32_t>(seed >> 32));
}

// The 16-bit draw of (query, key) out of its group's words.
FRX_HOST_DEVICE uint32_t dropout_half(const PhiloxWords& words, uint32_t query, uint32_t key) {
  const uint32_t word = ((query >> 3) & 1u) * 2u + ((key >> 3) & 1u);
  return (words.w[word] >> (16u * (key & 1u))) & 0xFFFFu;
}

// keep_threshold = round((1 - p) * 65536).
FRX_HOST_DEVICE bool dropout_keep(uint64_t seed, uint64_t batch_head, uint32_t query, uint32_t key,
                                  uint32_t keep_threshold) {
  return dropout_half(dropout_words(seed, batch_head, query, key), query, key) < keep_threshold;
}

}  // namespace frx
