// Runs blocks of a warp-specialised Hopper kernel on the host: one fiber a thread, the blocks of a
// cluster at the same time.
//
// What the hardware does in its own time happens as late or as early as it may: copies land when
// the scheduler's dice say so, and tensor cores read shared memory only when a thread waits for
// them. A stage that is read before it is full, or released before it has been read, gives wrong
// results. When no thread can go on, that is an error. Shared memory starts out full of NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
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
inline bool is_misaligned = false;     // an access was, which would have stopped a GPU

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
  std::vector<std::function<void()>> unseen;  // copies that it has waited for, other threads not
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::function<void()> body;
  Index thread, block, grid_dim;
  int running = 0;
  std::map<int, Meeting> named;
  std::vector<Meeting> warps;
  std::vector<uint32_t> offered;                 // by each thread, in a shuffle
  std::vector<std::array<uint32_t, 6>> brought;  // likewise, to an instruction of the whole warp
  std::map<const void*, Mbarrier> mbarriers;
  std::vector<std::function<void()>> copies;  // under way
  std::exception_ptr failure;                 // of a fiber, for whoever runs the block
  std::vector<int> order;                     // of threads
  std::vector<int> rests;                     // of each warp: rounds that it does not take part in
  int left = 0;                               // threads that are not done
  std::vector<unsigned char> smem;            // while another block of the cluster runs
};

struct Cluster {
  std::vector<Block> blocks;
  int running = 0;
  Meeting meeting;
};

inline Cluster& cluster() {
  static Cluster instance{std::vector<Block>(1)};
  return instance;
}

inline Block& block() { return cluster().blocks[cluster().running]; }

// Whether blocks run in clusters where a kernel wants to.
inline bool& has_clusters() {
  static bool value = false;
  return value;
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

// Whether a thread must have waited before it lets the next kernel start, so that what it has
// waited for is complete for that one as well.
inline bool says_so_last = false;

// Whether a thread must have waited before it arrives at an mbarrier, since what it tells others
// there it has read from memory.
inline bool arrives_last = false;

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

// Where copies may read; empty: anywhere.
inline std::vector<Range>& readable() {
  static std::vector<Range> instance;
  return instance;
}

inline void check_read(const void* address, int bytes) {
  const std::vector<Range>& ranges = readable();
  const void* last = static_cast<const char*>(address) + bytes - 1;
  const auto holds = [=](const Range& range) { return range.has(address) && range.has(last); };
  if (!ranges.empty() && std::none_of(ranges.begin(), ranges.end(), holds)) {
    throw std::runtime_error("a copy reads outside of every tensor");
  }
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

// What a barrier does beside waiting: others see what this thread has waited for.
inline void show_copies() {
  for (const auto& copy : self().unseen) copy();
  self().unseen.clear();
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

// The block of the cluster whose threads run, and whose shared memory lies where kernels see it.
inline void switch_to(int rank) {
  Cluster& c = cluster();
  if (rank == c.running) return;
  block().smem.assign(smem, smem + kSmemBytes);
  c.running = rank;
  std::copy(block().smem.begin(), block().smem.end(), smem);
}

inline void start_block() {
  Block& b = block();
  const int count = static_cast<int>(b.fibers.size());
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = b.fibers[i];
    fiber.is_done = fiber.has_waited = false;
    fiber.may_go_on = nullptr;
    fiber.groups.clear();
    fiber.open_group.clear();
    fiber.unseen.clear();
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
  b.brought.assign(count, {});
  b.order.resize(count);
  std::iota(b.order.begin(), b.order.end(), 0);
  b.rests.assign(count / kWarp, 0);
  b.left = count;
}

inline void land_copy(std::mt19937& random) {
  Block& b = block();
  const size_t which = random() % b.copies.size();
  const auto copy = b.copies[which];
  b.copies.erase(b.copies.begin() + which);
  copy();
}

// Every thread of the block as far as it can go; whether anything happened. Now and then a warp
// rests for a while, so that others get far ahead of it if nothing makes them wait.
inline bool run_round(std::mt19937& random) {
  Block& b = block();
  // Warps in a new order each time, lanes likewise.
  std::shuffle(b.order.begin(), b.order.end(), random);
  for (int& rest : b.rests) {
    if (rest > 0) {
      --rest;
    } else if (random() % 64 == 0) {
      rest = static_cast<int>(random() % 64);
    }
  }
  bool moved = false;
  for (int i : b.order) {
    Fiber& fiber = b.fibers[i];
    if (fiber.is_done || (fiber.may_go_on && !fiber.may_go_on())) continue;
    if (b.rests[i / kWarp] > 0) {
      moved = true;
      continue;
    }
    fiber.may_go_on = nullptr;
    b.running = i;
    b.thread.x = static_cast<unsigned>(i);
    swapcontext(&b.scheduler, &fiber.context);
    if (b.failure) std::rethrow_exception(b.failure);
    b.left -= fiber.is_done;
    moved = true;
    if (!b.copies.empty() && random() % 64 == 0) land_copy(random);
  }
  if (moved || b.copies.empty()) return moved;
  land_copy(random);
  return true;
}

inline void run_cluster(std::mt19937& random) {
  std::vector<int> ranks(cluster().blocks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  for (int left = 1; left > 0;) {
    left = 0;
    bool moved = false;
    std::shuffle(ranks.begin(), ranks.end(), random);
    for (int rank : ranks) {
      switch_to(rank);
      if (block().left > 0) moved |= run_round(random);
      left += block().left;
    }
    if (!moved && left > 0) throw std::runtime_error("threads wait for each other");
  }
}

inline void run_grid(int64_t blocks, int threads, size_t smem_bytes, std::function<void()> body,
                     int cluster_size = 1) {
  constexpr unsigned char kPoison = 0xFF;
  if (smem_bytes > kSmemBytes) throw std::runtime_error("more shared memory than a block may have");
  std::mt19937 random(seed());
  is_misaligned = false;
  cluster() = {std::vector<Block>(cluster_size)};
  for (Block& b : cluster().blocks) {
    b.fibers = std::vector<Fiber>(threads);
    b.body = body;
    b.grid_dim.x = static_cast<unsigned>(blocks);
    b.smem.resize(kSmemBytes);
  }
  for (int64_t first = 0; first < blocks; first += cluster_size) {
    for (int rank = 0; rank < cluster_size; ++rank) {
      switch_to(rank);
      std::memset(smem, kPoison, kSmemBytes);
      block().block.x = static_cast<unsigned>(first + rank);
      start_block();
    }
    run_cluster(random);
    for (int rank = 0; rank < cluster_size; ++rank) {
      switch_to(rank);
      if (!block().copies.empty()) {
        throw std::runtime_error("the block ends while copies are under way");
      }
      const auto is_written = [](unsigned char c) { return c != kPoison; };
      if (std::any_of(smem + smem_bytes, smem + kSmemBytes, is_written)) {
        throw std::runtime_error("a write past the end of shared memory");
      }
    }
  }
  cluster() = {std::vector<Block>(1)};
  if (is_misaligned) throw std::runtime_error("an access is not aligned to its type");
}

// 128-byte swizzle: 16-byte pieces of a row are permuted by the row's number within eight.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

}  // namespace hopper

// What the compiler calls in front of every access that is not aligned (-fsanitize=alignment). It
// may not throw.
extern "C" [[gnu::used]] inline void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) {
  hopper::is_misaligned = true;
}
