// Runs a CUDA grid on the host: one fiber a thread, one block after another.
//
// A fiber runs until it meets a barrier or a shuffle, and goes on when all who must take part have
// arrived. The order in which warps and lanes run is drawn from a seed, and a warp runs as far
// ahead as barriers let it: a result that depends on the order betrays a missing one. Waiting that
// nobody can end, or threads that leave while others wait at a barrier, is an error, and so is a
// write past the shared memory asked for. Shared memory starts out full of NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kSmemCapacity = 256 * 1024;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Coordinates {
  Index thread, block, block_dim, grid_dim;
};

struct EmulatedGpu {
  int num_sms = 2;
  int max_smem_bytes = 227 * 1024;
  unsigned seed = 0;              // of the order in which threads run
  unsigned char* smem = nullptr;  // the array behind the kernels' extern __shared__
};

inline EmulatedGpu& gpu() {
  static EmulatedGpu instance;
  return instance;
}

enum class State { kReady, kAtShuffle, kAtBarrier, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  State state = State::kReady;
  float offered = 0.f, received = 0.f;
  int lane_mask = 0;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::function<void()> body;
  Coordinates coordinates;
  int running = 0;
};

inline Block& block() {
  static Block instance;
  return instance;
}

inline Coordinates& current() { return block().coordinates; }

inline void wait_as(State state) {
  Fiber& fiber = block().fibers[block().running];
  fiber.state = state;
  swapcontext(&fiber.context, &block().scheduler);
}

inline void sync_block() { wait_as(State::kAtBarrier); }

inline float shuffle_xor(float value, int lane_mask) {
  const int self = block().running;
  block().fibers[self].offered = value;
  block().fibers[self].lane_mask = lane_mask;
  wait_as(State::kAtShuffle);
  return block().fibers[self].received;
}

inline void run_fiber() {
  block().body();
  wait_as(State::kDone);
}

inline bool all_are(const Fiber* begin, const Fiber* end, State state) {
  return std::all_of(begin, end, [state](const Fiber& f) { return f.state == state; });
}

// Runs a warp's lanes, in a new order each time, until all of them wait for others or are done.
inline void run_warp(int first, std::mt19937& random) {
  Fiber* lanes = &block().fibers[first];
  int order[kWarp];
  std::iota(order, order + kWarp, 0);
  for (bool goes_on = true; goes_on;) {
    std::shuffle(order, order + kWarp, random);
    for (int lane : order) {
      if (lanes[lane].state != State::kReady) continue;
      block().running = first + lane;
      current().thread.x = first + lane;
      swapcontext(&block().scheduler, &lanes[lane].context);
    }
    goes_on = all_are(lanes, lanes + kWarp, State::kAtShuffle);
    if (!goes_on) continue;
    for (int lane = 0; lane < kWarp; ++lane) {
      lanes[lane].received = lanes[lane ^ lanes[lane].lane_mask].offered;
      lanes[lane].state = State::kReady;
    }
  }
}

inline void run_block(std::mt19937& random) {
  auto& fibers = block().fibers;
  const int num_fibers = static_cast<int>(fibers.size());
  std::vector<int> warps;
  for (int i = 0; i < num_fibers; ++i) {
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = fibers[i].stack.get();
    fibers[i].context.uc_stack.ss_size = kStackBytes;
    fibers[i].context.uc_link = nullptr;
    makecontext(&fibers[i].context, run_fiber, 0);
    fibers[i].state = State::kReady;
    if (i % kWarp == 0) warps.push_back(i);
  }
  Fiber* const begin = fibers.data();
  Fiber* const end = begin + num_fibers;
  // Each warp in turn runs as far as it can: nothing but barriers keeps it from overtaking others.
  while (!all_are(begin, end, State::kDone)) {
    std::shuffle(warps.begin(), warps.end(), random);
    for (int first : warps) run_warp(first, random);
    if (all_are(begin, end, State::kAtBarrier)) {
      for (Fiber& fiber : fibers) fiber.state = State::kReady;
    } else if (!all_are(begin, end, State::kDone)) {
      throw std::runtime_error("threads wait for each other");
    }
  }
}

template <class Body>
void run_grid(int64_t blocks, int threads, size_t smem_bytes, Body body) {
  constexpr unsigned char kPoison = 0xFF;
  if (threads % kWarp != 0) throw std::runtime_error("a block is not of whole warps");
  if (smem_bytes > static_cast<size_t>(gpu().max_smem_bytes)) {
    throw std::runtime_error("more shared memory than a block may have");
  }
  std::mt19937 random(gpu().seed);
  block().fibers = std::vector<Fiber>(threads);
  block().body = body;
  current().block_dim.x = threads;
  current().grid_dim.x = static_cast<unsigned>(blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    std::memset(gpu().smem, kPoison, kSmemCapacity);
    current().block.x = static_cast<unsigned>(b);
    run_block(random);
    unsigned char* const end = gpu().smem + kSmemCapacity;
    if (std::any_of(gpu().smem + smem_bytes, end, [](unsigned char c) { return c != kPoison; })) {
      throw std::runtime_error("a write past the end of shared memory");
    }
  }
  block().fibers.clear();
}

}  // namespace emulation
