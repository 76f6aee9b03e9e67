// The instructions of ptx_sm90.cuh that kernels on the emulator use.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace frx {

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - hopper::smem);
}

inline void mbarrier_init(uint64_t& barrier, uint32_t arrivals) {
  hopper::block().mbarriers[&barrier] = {arrivals, arrivals};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint64_t& barrier) { hopper::mbarrier(&barrier).arrive(); }
inline void mbarrier_arrive_expect_tx(uint64_t& barrier, uint32_t bytes) {
  hopper::mbarrier(&barrier).bytes += bytes;
  hopper::mbarrier(&barrier).arrive();
}
inline void mbarrier_wait(uint64_t& barrier, uint32_t parity) {
  hopper::wait_until([&barrier, parity] { return hopper::mbarrier(&barrier).phase != parity; });
}

inline void prefetch_tensormap(const CUtensorMap&) {}

// The copy lands when the scheduler says so. row_of(i) is the matrix' row that is the box's i-th.
template <class RowOf>
void copy_box(void* destination, const CUtensorMap& map, uint64_t& barrier, int c0, RowOf row_of) {
  const uint32_t start = smem_address(destination);
  if (start % 128 != 0) throw std::runtime_error("a copy's destination is not 128-byte aligned");
  const CUtensorMap m = map;
  hopper::block().copies.push_back([=, &barrier] {
    for (int row = 0; row < m.box_rows; ++row) {
      for (int column = 0; column < m.box_width; ++column) {
        const int64_t r = row_of(row), c = static_cast<int64_t>(c0) + column;
        const bool exists = r >= 0 && r < m.rows && c >= 0 && c < m.width;
        const uint16_t value = exists ? m.data[r * m.width + c] : 0;
        std::memcpy(hopper::smem + hopper::swizzled(start + row * 128 + column * 2), &value, 2);
      }
    }
    hopper::Mbarrier& full = hopper::mbarrier(&barrier);
    full.bytes -= int64_t{2} * m.box_rows * m.box_width;
    full.finish();
  });
}

inline void cp_async_bulk_tensor_4d(void* destination, const CUtensorMap& map, uint64_t& barrier,
                                    int c0, int c1, int, int) {
  copy_box(destination, map, barrier, c0, [c1](int row) { return int64_t{c1} + row; });
}

inline void cp_async_bulk_tensor_5d(void* destination, const CUtensorMap& map, uint64_t& barrier,
                                    int c0, int c1, int c2, int c3, int c4) {
  if (c1 != 0 || c2 != 0) throw std::runtime_error("a copy starts within a pair of chunks");
  const int64_t half = map.half, box_chunks = map.box_chunks, rows = map.rows;
  copy_box(destination, map, barrier, c0, [=](int row) {
    const int64_t unit = row / 16, chunk = c3 + unit % box_chunks, axis = c4 + unit / box_chunks;
    const bool exists = chunk < half / 8 && axis < rows / (2 * half);
    return exists ? 2 * half * axis + half * (row / 8 % 2) + 8 * chunk + row % 8 : int64_t{-1};
  });
}

inline void named_barrier_sync(int id, int threads) {
  hopper::meet(hopper::block().named[id], threads);
}

inline void named_barrier_arrive(int id, int threads) {
  hopper::arrive(hopper::block().named[id], threads);
}

template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

}  // namespace frx
