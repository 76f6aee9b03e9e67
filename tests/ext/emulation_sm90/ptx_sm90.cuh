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
inline void check_arrival() {
  if (hopper::arrives_last && hopper::previous().is_chained && !hopper::self().has_waited) {
    throw std::runtime_error("a thread arrives before it has waited for the kernel before");
  }
}
inline void mbarrier_arrive(uint64_t& barrier) {
  check_arrival();
  hopper::mbarrier(&barrier).arrive();
}
// A cluster is one block here.
inline void mbarrier_arrive_in_cluster(uint64_t& barrier, int rank) {
  if (rank != 0) throw std::runtime_error("an arrival at a block that the cluster does not have");
  mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect_tx(uint64_t& barrier, uint32_t bytes) {
  hopper::mbarrier(&barrier).bytes += bytes;
  hopper::mbarrier(&barrier).arrive();
}
inline void mbarrier_wait(uint64_t& barrier, uint32_t parity) {
  hopper::wait_until([&barrier, parity] { return hopper::mbarrier(&barrier).phase != parity; });
}

inline void prefetch_tensormap(const CUtensorMap&) {}

// To nearest, halves away from zero.
inline void round_to_tf32(unsigned char* number) {
  uint32_t bits;
  std::memcpy(&bits, number, 4);
  bits = (bits + 0x1000) & ~0x1FFFu;
  std::memcpy(number, &bits, 4);
}

// The copy lands when the scheduler says so. row_of(i) is the matrix' row that is the box's i-th.
template <class RowOf>
void copy_box(void* destination, const CUtensorMap& map, uint64_t& barrier, int c0, RowOf row_of) {
  const uint32_t start = smem_address(destination);
  if (start % 128 != 0) throw std::runtime_error("a copy's destination is not 128-byte aligned");
  const CUtensorMap m = map;
  if (hopper::is_unfinished(m.data)) {
    throw std::runtime_error("a copy of what the kernel before has not written yet");
  }
  hopper::block().copies.push_back([=, &barrier] {
    for (int row = 0; row < m.box_rows; ++row) {
      for (int column = 0; column < m.box_width; ++column) {
        const int64_t r = row_of(row), c = static_cast<int64_t>(c0) + column;
        const bool exists = r >= 0 && r < m.rows && c >= 0 && c < m.width;
        const int64_t stride = m.token_stride == 0 ? m.width : m.token_stride;
        const int size = m.element_bytes;
        unsigned char* const to =
            hopper::smem + hopper::swizzled(start + row * 128 + column * size);
        std::memset(to, 0, size);
        if (exists) std::memcpy(to, m.data + (r * stride + c) * size, size);
        if (size == 4) round_to_tf32(to);
      }
    }
    hopper::Mbarrier& full = hopper::mbarrier(&barrier);
    full.bytes -= int64_t{m.element_bytes} * m.box_rows * m.box_width;
    full.finish();
  });
}

inline void cp_async_bulk_tensor_4d(void* destination, const CUtensorMap& map, uint64_t& barrier,
                                    int c0, int c1, int c2, int c3) {
  CUtensorMap of_head = map;
  of_head.data += (c2 * map.head_stride + c3 * map.batch_stride) * map.element_bytes;
  copy_box(destination, of_head, barrier, c0, [c1](int row) { return int64_t{c1} + row; });
}

inline void cp_async_bulk_tensor_4d_multicast(void* destination, const CUtensorMap& map,
                                              uint64_t& barrier, int c0, int c1, int c2, int c3,
                                              uint16_t mask) {
  if (mask != 1) throw std::runtime_error("a copy into blocks that the cluster does not have");
  cp_async_bulk_tensor_4d(destination, map, barrier, c0, c1, c2, c3);
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

inline void cp_async_bulk(void* destination, const void* source, uint32_t bytes,
                          uint64_t& barrier) {
  const uint32_t start = smem_address(destination);
  if (start % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0) {
    throw std::runtime_error("a copy is not 16-byte aligned");
  }
  if (hopper::is_unfinished(source)) {
    throw std::runtime_error("a copy of what the kernel before has not written yet");
  }
  hopper::block().copies.push_back([=, &barrier] {
    std::memcpy(hopper::smem + start, source, bytes);
    hopper::Mbarrier& full = hopper::mbarrier(&barrier);
    full.bytes -= bytes;
    full.finish();
  });
}

// Additions, too, happen when the scheduler says so; the block may end before.
inline int& unread_additions() {
  static std::map<int, int> of_thread;
  return of_thread[hopper::block().running];
}
inline void cp_reduce_async_bulk_add(float* destination, const void* source, uint32_t bytes) {
  hopper::check_store();
  const uint32_t start = smem_address(source);
  if (start % 16 != 0 || reinterpret_cast<uintptr_t>(destination) % 16 != 0) {
    throw std::runtime_error("an addition is not 16-byte aligned");
  }
  int& unread = unread_additions();
  ++unread;
  hopper::block().copies.push_back([=, &unread] {
    for (uint32_t i = 0; i < bytes / 4; ++i) {
      float x;
      std::memcpy(&x, hopper::smem + start + 4 * i, 4);
      destination[i] += x;
    }
    --unread;
  });
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_read() {
  const int& unread = unread_additions();
  hopper::wait_until([&unread] { return unread == 0; });
}

inline void fence_proxy_async() {}

inline void stmatrix_x4_transposed(uint32_t address, const uint32_t (&x)[4]) {
  const int lane = hopper::block().running % hopper::kWarp, column = lane / 4;
  for (int m = 0; m < 4; ++m) {
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = hopper::shuffle(address, 8 * m + 2 * (lane % 4) + half);
      const uint16_t value = static_cast<uint16_t>(x[m] >> 16 * half);
      std::memcpy(hopper::smem + row + 2 * column, &value, 2);
    }
  }
}

inline void st_global_v2(void* destination, float2 x) {
  hopper::check_store();
  if (reinterpret_cast<uintptr_t>(destination) % 8 != 0) {
    throw std::runtime_error("a store is not 8-byte aligned");
  }
  std::memcpy(destination, &x, sizeof(x));
}

inline void st_global_v4(void* destination, uint4 x) {
  hopper::check_store();
  if (reinterpret_cast<uintptr_t>(destination) % 16 != 0) {
    throw std::runtime_error("a store is not 16-byte aligned");
  }
  std::memcpy(destination, &x, sizeof(x));
}

inline void named_barrier_sync(int id, int threads) {
  hopper::show_copies();
  hopper::meet(hopper::block().named[id], threads);
}

inline void named_barrier_arrive(int id, int threads) {
  hopper::show_copies();
  hopper::arrive(hopper::block().named[id], threads);
}

template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

}  // namespace frx
