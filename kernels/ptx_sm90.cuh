// One wrapper per instruction of sm_90(a): mbarrier, bulk tensor copy, named barriers, fences,
// register reallocation. wgmma has its own file. Shared-memory addresses are 32-bit.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace frx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier ---------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier)) : "memory");
}

// At that of a block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint64_t& barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 address;\n"
      "mapa.shared::cluster.u32 address, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [address];\n"
      "}" ::"r"(smem_address(&barrier)),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t& barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase of that parity is over; a fresh barrier counts as past parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// ---- copy engine ------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box of a 4-D tensor into shared memory; completes as bytes on the barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(void* destination, const CUtensorMap& map,
                                                        uint64_t& barrier, int c0, int c1, int c2,
                                                        int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(destination)),
      "l"(&map), "r"(smem_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same into the same place of several blocks of a cluster, those in `mask`; completes on the
// barrier of each.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_multicast(void* destination,
                                                                  const CUtensorMap& map,
                                                                  uint64_t& barrier, int c0, int c1,
                                                                  int c2, int c3, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(destination)),
      "l"(&map), "r"(smem_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask)
      : "memory");
}

// A box of a 5-D tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(void* destination, const CUtensorMap& map,
                                                        uint64_t& barrier, int c0, int c1, int c2,
                                                        int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(destination)),
      "l"(&map), "r"(smem_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Bytes of global memory into shared memory, completing on the barrier. Both start at multiples of
// 16 bytes, and so many are a multiple of 16.
__device__ __forceinline__ void cp_async_bulk(void* destination, const void* source, uint32_t bytes,
                                              uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(destination)),
      "l"(source), "r"(bytes), "r"(smem_address(&barrier))
      : "memory");
}

// Adds floats of shared memory to as many of global memory, each atomically. Both start at
// multiples of 16 bytes; the copies of a thread since its last commit are a group.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* destination, const void* source,
                                                         uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(smem_address(source)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns once the thread's groups have read their shared memory.
__device__ __forceinline__ void cp_async_bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of tensor cores and the
// copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- fragments --------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements, transposed. Lane 8m + r passes where row r of the stored
// matrix m goes, 16 bytes; of matrix m before transposing it holds row lane / 4, columns 2 (lane %
// 4) and the next, in x[m].
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// ---- stores -----------------------------------------------------------------------------------

// For loops: where they are not unrolled, nvcc 13 makes two or four stores of an assignment.
// Nothing in a kernel reads what it stores so.
__device__ __forceinline__ void st_global_v2(void* destination, float2 x) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(destination), "f"(x.x), "f"(x.y));
}
__device__ __forceinline__ void st_global_v4(void* destination, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w));
}

// ---- named barriers ---------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- registers --------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace frx
