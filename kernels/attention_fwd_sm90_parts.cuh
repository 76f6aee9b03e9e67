// Loads and products of the Hopper forward kernel.
#pragma once

#include <cstdint>

#include "attention_fwd_sm90_items.cuh"
#include "chained_launch.cuh"
#include "ptx_sm90.cuh"
#include "scores.cuh"
#include "tile_sm90.cuh"
#include "wgmma_sm90.cuh"

namespace frx {

// ---- loads ------------------------------------------------------------------------------------

// Of one tile of keys.
template <class Config>
__device__ __forceinline__ void load_values(ForwardStorage<Config>& smem, uint32_t stage,
                                            const CUtensorMap& map, int first_key, int head,
                                            int batch) {
  if constexpr (Config::kValuesTransposed) {
    wait_for_previous_kernel();  // which may be the one that transposes them
    load_transposed_tile(smem.v[stage], map, smem.v_full[stage], first_key, head, batch);
  } else {
    load_tile(smem.v[stage], map, smem.v_full[stage], first_key, head, batch);
  }
}

// Value rows of keys that do not exist become zero: their weight is 0, but 0 * NaN is not. Rows
// beyond the tensor arrive as zeros, those beyond kv_lengths or removed by key_keep do not. Every
// consumer writes the same zeros, so they need not meet. (Transposed values are zero already.)
template <class Config, bool kModified>
__device__ __forceinline__ void clear_absent_values(
    uint16_t (&v)[Config::kSlabs][Config::kTileK][Config::kSlabDims], const HeadScores& scores,
    int first_key, int num_keys, int consumer, int thread) {
  const bool is_cut = scores.key_count < num_keys && first_key + Config::kTileK > scores.key_count;
  const bool has_holes = kModified && scores.key_keep != nullptr;
  if (!is_cut && !has_holes) return;
  for (int row = thread; row < Config::kTileK; row += kWarpgroup) {
    const int key = first_key + row;
    const bool exists = kModified ? scores.key_exists(key) : key < scores.key_count;
    if (exists) continue;
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      uint4* chunks = reinterpret_cast<uint4*>(v[slab][row]);
      for (int i = 0; i < Config::kRowBytes / 16; ++i) chunks[i] = make_uint4(0, 0, 0, 0);
    }
  }
  fence_proxy_async();
  named_barrier_sync(kWarpgroupOwn + consumer, kWarpgroup);
}

// ---- products ---------------------------------------------------------------------------------

// s = q k^T for the warpgroup's 64 queries. s [64, kTileK].
template <class Config, class Element>
__device__ __forceinline__ void multiply_scores(float (&s)[Config::kTileK / 2], SmemDescriptor q,
                                                SmemDescriptor k) {
#pragma unroll
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
#pragma unroll
    for (int step = 0; step < Config::kRowBytes / 32; ++step) {
      Wgmma<Element, Config::kTileK>::ss(s, q + (slab * Config::kSlabBytesQ + step * 32),
                                         k + (slab * Config::kSlabBytesK + step * 32),
                                         slab + step > 0);
    }
  }
}

// o += p v. p [64, kTileK] in registers, v [kTileK, D] with D contiguous, in TF32 keys.
template <class Config, class Element>
__device__ __forceinline__ void multiply_values(float (&o)[Config::kHeadDim / 2],
                                                const uint32_t (&p)[Config::kWeightRegisters],
                                                SmemDescriptor v) {
#pragma unroll
  for (int step = 0; step < Config::kWeightRegisters / 4; ++step) {
    if constexpr (Config::kValuesTransposed) {
      // Rows g and g + 8 at depth t, then at t + 4: columns 2t and 2t + 1 of the weights.
      constexpr int kSlabSteps = Config::kRowBytes / 32;
      Wgmma<Element, Config::kHeadDim>::rs(
          o, p[4 * step], p[4 * step + 2], p[4 * step + 1], p[4 * step + 3],
          v + (step / kSlabSteps * Config::kSlabBytesV + step % kSlabSteps * 32));
    } else {
      Wgmma<Element, Config::kHeadDim>::rs(o, p[4 * step], p[4 * step + 1], p[4 * step + 2],
                                           p[4 * step + 3], v + step * 16 * Config::kRowBytes);
    }
  }
}

}  // namespace frx
