// Runs blocks of a warp-specialised Hopper kernel on the host: one fiber a thread.
//
// What the hardware does in its own time happens as late or as early as it may: copies land when
// the scheduler's dice say so, and tensor cores read shared memory only when a thread waits for
// them. A stage that is read before it is full, or released before it has been read, gives wrong
// results. When no thread can go on, that is an error. Shared memory starts out full of NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

namespace hopper {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 96 * 1024;
constexpr size_t kSmemBytes = 227 * 1024;
inline unsigned char* smem = nullptr;  // the array behind the kernels' extern __shared__

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Threads that meet: as many as the barrier was told.
struct Meeting {
  int arrived = 0;
  uint64_t round = 0;
};

struct Mbarrier {
  int64_t arrivals, pending;
  int64_t bytes = 0;
  uint32_t phase = 0;  // parity of the phase under way

  void arrive() {
    if (--pending < 0) throw std::runtime_error("an mbarrier has more arrivals than it was told");
    finish();
  }
  void finish() {
    if (pending != 0 || bytes != 0) return;
    pending = arrivals;
    phase ^= 1;
  }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  std::function<bool()> may_go_on;  // empty: ready
  bool is_done = false;
  bool has_waited = false;                                 // for the kernel before
  std::vector<std::vector<std::function<void()>>> groups;  // of products, oldest first
  std::vector<std::function<void()>> open_group;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::function<void()> body;
  Index thread, block, grid_dim;
  int running = 0;
  std::map<int, Meeting> named;
  std::vector<Meeting> warps;
  std::vector<uint32_t> offered;  // by each thread, in a shuffle
  std::map<const void*, Mbarrier> mbarriers;
  std::vector<std::function<void()>> copies;  // under way
  std::exception_ptr failure;                 // of a fiber, for whoever runs the block
};

inline Block& block() {
  static Block instance;
  return instance;
}

inline unsigned& seed() {
  static unsigned value = 0;
  return value;
}

inline Fiber& self() { return block().fibers[block().running]; }

struct Range {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool has(const void* address) const { return address >= begin && address < end; }
};

// The kernel that precedes a chained one: what it writes is there for a thread that has waited, and
// so may a thread store only then. Without a chain nothing is checked.
struct Previous : Range {
  bool is_chained = false;
};

inline Previous& previous() {
  static Previous instance;
  return instance;
}

// What kernels of a chain write for later ones, whichever of them: the same holds at each launch.
inline std::vector<Range>& written_in_chain() {
  static std::vector<Range> instance;
  return instance;
}

inline bool is_unfinished(const void* address) {
  if (!previous().is_chained || self().has_waited) return false;
  if (previous().has(address)) return true;
  const std::vector<Range>& ranges = written_in_chain();
  return std::any_of(ranges.begin(), ranges.end(),
                     [address](const Range& range) { return range.has(address); });
}

inline void check_store() {
  if (previous().is_chained && !self().has_waited) {
    throw std::runtime_error("a thread stores before it has waited for the kernel before");
  }
}

inline void wait_until(std::function<bool()> may_go_on) {
  if (may_go_on()) return;
  Fiber& fiber = self();
  fiber.may_go_on = std::move(may_go_on);
  swapcontext(&fiber.context, &block().scheduler);
}

inline void arrive(Meeting& meeting, int threads) {
  if (++meeting.arrived < threads) return;
  meeting.arrived = 0;
  ++meeting.round;
}

inline void meet(Meeting& meeting, int threads) {
  const uint64_t round = meeting.round;
  arrive(meeting, threads);
  wait_until([&meeting, round] { return meeting.round != round; });
}

inline void sync_warp() { meet(block().warps[block().running / kWarp], kWarp); }

inline uint32_t shuffle(uint32_t value, int from_lane) {
  const int self_index = block().running, first = self_index / kWarp * kWarp;
  block().offered[self_index] = value;
  sync_warp();
  const uint32_t received = block().offered[first + from_lane];
  sync_warp();
  return received;
}

inline Mbarrier& mbarrier(const void* address) {
  const auto found = block().mbarriers.find(address);
  if (found == block().mbarriers.end()) throw std::runtime_error("an mbarrier without init");
  return found->second;
}

inline void run_fiber() {
  try {
    block().body();
  } catch (...) {
    block().failure = std::current_exception();
  }
  self().is_done = true;
  swapcontext(&self().context, &block().scheduler);
}

inline void run_block(std::mt19937& random) {
  Block& b = block();
  const int count = static_cast<int>(b.fibers.size());
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = b.fibers[i];
    fiber.is_done = fiber.has_waited = false;
    fiber.may_go_on = nullptr;
    fiber.groups.clear();
    fiber.open_group.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  b.named.clear();
  b.mbarriers.clear();
  b.copies.clear();
  b.failure = nullptr;
  b.warps.assign(count / kWarp, Meeting());
  b.offered.assign(count, 0);
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto land = [&] {
    const size_t which = random() % b.copies.size();
    const auto copy = b.copies[which];
    b.copies.erase(b.copies.begin() + which);
    copy();
  };
  for (int left = count; left > 0;) {
    // Warps in a new order each time, lanes likewise.
    std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (int i : order) {
      Fiber& fiber = b.fibers[i];
      if (fiber.is_done || (fiber.may_go_on && !fiber.may_go_on())) continue;
      fiber.may_go_on = nullptr;
      b.running = i;
      b.thread.x = static_cast<unsigned>(i);
      swapcontext(&b.scheduler, &fiber.context);
      if (b.failure) std::rethrow_exception(b.failure);
      left -= fiber.is_done;
      moved = true;
      if (!b.copies.empty() && random() % 64 == 0) land();
    }
    if (moved) continue;
    if (b.copies.empty() && left > 0) throw std::runtime_error("threads wait for each other");
    if (!b.copies.empty()) land();
  }
  if (!b.copies.empty()) throw std::runtime_error("the block ends while copies are under way");
}

inline void run_grid(int64_t blocks, int threads, size_t smem_bytes, std::function<void()> body) {
  if (smem_bytes > kSmemBytes) throw std::runtime_error("more shared memory than a block may have");
  std::mt19937 random(seed());
  block().fibers = std::vector<Fiber>(threads);
  block().body = std::move(body);
  block().grid_dim.x = static_cast<unsigned>(blocks);
  constexpr unsigned char kPoison = 0xFF;
  for (int64_t i = 0; i < blocks; ++i) {
    std::memset(smem, kPoison, kSmemBytes);
    block().block.x = static_cast<unsigned>(i);
    run_block(random);
    const auto is_written = [](unsigned char c) { return c != kPoison; };
    if (std::any_of(smem + smem_bytes, smem + kSmemBytes, is_written)) {
      throw std::runtime_error("a write past the end of shared memory");
    }
  }
  block().fibers.clear();
}

// 128-byte swizzle: 16-byte pieces of a row are permuted by the row's number within eight.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

}  // namespace hopper
