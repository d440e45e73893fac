#include "tests/cuda/emulator/block.h"

#include <sstream>
#include <vector>

#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/emulator/fiber.h"
#include "tests/cuda/emulator/order.h"
#include "tests/cuda/emulator/shared_array.h"

// CUDA's own names for where a thread stands.
uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace emulator {

Moment now;
std::uint32_t block_begin = 0;

namespace {

namespace context = boost::context::detail;

enum class State { kNew, kReady, kAtBarrier, kInWarpOperation, kEnded };

struct Thread {
  State state = State::kNew;
  uint3 index;
  context::fcontext_t resume_at = nullptr;
  FiberStack* stack = nullptr;
  // What it waits for.
  Site site{};
  const char* what = nullptr;
  void* data = nullptr;
};

// Everything about the block that runs; one runs at a time.
struct Block {
  const Grid* grid = nullptr;
  int num_threads = 0;
  std::vector<Thread> threads{kMaxThreads};
  std::vector<int> ready;
  std::size_t next = 0;  // in `ready`
  int at_barrier = 0, ended = 0;
  std::uint32_t barrier = 0;
  Thread* running = nullptr;
  std::string failure;

  context::fcontext_t scheduler = nullptr;
  std::unique_ptr<FiberStack> home;
  std::vector<std::unique_ptr<FiberStack>> stacks;
  std::vector<FiberStack*> free_stacks;
};

Block& block() {
  static Block instance;
  return instance;
}
thread_local bool this_thread_runs = false;

int index_of(const Block& b, const Thread& thread) {
  return static_cast<int>(&thread - b.threads.data());
}

// Gives the host thread back; returns when the scheduler resumes this thread.
void suspend() {
  Block& b = block();
  FiberStack* const stack = b.running->stack;
  stack->leave_for(*b.home);
  b.scheduler = context::jump_fcontext(b.scheduler, nullptr).fctx;
  stack->arrive_from(*b.home);
}

// Thrown by a thread that has failed.
struct Failed {};

[[noreturn]] EMULATOR_CHANGES_FIBERS void leave_for_ever() {
  Block& b = block();
  b.running->stack->leave_for(*b.home, /*ends=*/true);
  context::jump_fcontext(b.scheduler, nullptr);
  __builtin_unreachable();
}

EMULATOR_CHANGES_FIBERS void enter(context::transfer_t from) {
  Block& b = block();
  b.scheduler = from.fctx;
  b.running->stack->arrive_from(*b.home);
  try {
    b.grid->thread();
    b.running->state = State::kEnded;
    ++b.ended;
  } catch (const Failed&) {
    // The block ends.
  }
  leave_for_ever();
}

void resume(Block& b, Thread& thread) {
  b.running = &thread;
  const bool is_new = thread.state == State::kNew;
  if (is_new) {
    if (b.free_stacks.empty()) {
      b.stacks.push_back(std::make_unique<FiberStack>(true));
      b.free_stacks.push_back(b.stacks.back().get());
    }
    thread.stack = b.free_stacks.back();
    b.free_stacks.pop_back();
    thread.resume_at = thread.stack->prepare(&enter);
  }
  thread.state = State::kReady;
  threadIdx = thread.index;
  now = {b.barrier, static_cast<std::uint16_t>(index_of(b, thread))};
  b.home->leave_for(*thread.stack);
  thread.resume_at = context::jump_fcontext(thread.resume_at, nullptr).fctx;
  b.home->arrive_from(*thread.stack);
  if (thread.state == State::kEnded || !b.failure.empty()) {
    b.free_stacks.push_back(thread.stack);
  }
}

void make_ready(Block& b, int first, int count) {
  const bool backwards = seed() == 1;
  for (int k = 0; k < count; ++k) {
    b.ready.push_back(first + (backwards ? count - 1 - k : k));
  }
}

std::string describe_state(const Thread& thread) {
  switch (thread.state) {
    case State::kEnded:
      return "has ended";
    case State::kAtBarrier:
      return "waits at __syncthreads() in " + describe(thread.site);
    default:
      return std::string("waits at ") + thread.what + " in " +
             describe(thread.site);
  }
}

// No thread can go on: names one that waits, and one that it waits for.
std::string describe_deadlock(Block& b) {
  for (int t = 0; t < b.num_threads; ++t) {
    const Thread& waits = b.threads[t];
    if (waits.state == State::kEnded) continue;
    b.running = &b.threads[t];
    const bool in_warp = waits.state == State::kInWarpOperation;
    const int first = in_warp ? t / kWarpSize * kWarpSize : 0;
    for (int other = first; other < b.num_threads; ++other) {
      const Thread& late = b.threads[other];
      if (in_warp && other >= first + kWarpSize) break;
      if (late.state == waits.state && late.site == waits.site) continue;
      return "deadlock: " + describe_state(waits) + ", which " +
             thread_name(other) + " does not reach: it " + describe_state(late);
    }
    if (in_warp) {
      return "deadlock: " + describe_state(waits) +
             " for lanes that the block does not have";
    }
  }
  return "deadlock";
}

std::string where(const Block& b) {
  std::ostringstream text;
  text << b.grid->name << ": block ";
  if (gridDim.y == 1 && gridDim.z == 1) {
    text << blockIdx.x;
  } else {
    text << "(" << blockIdx.x << ", " << blockIdx.y << ", " << blockIdx.z
         << ")";
  }
  text << ", " << thread_name(index_of(b, *b.running)) << ": ";
  return text.str();
}

// Returns what went wrong.
void run_block(Block& b) {
  block_begin = ++b.barrier;
  begin_shared_memory();
  b.at_barrier = b.ended = 0;
  b.ready.clear();
  b.next = 0;
  for (int t = 0; t < b.num_threads; ++t) {
    b.threads[t].state = State::kNew;
  }
  make_ready(b, 0, b.num_threads);
  while (b.next < b.ready.size()) {
    if (seed() > 1) {
      std::swap(b.ready[b.next],
                b.ready[b.next + random_below(b.ready.size() - b.next)]);
    }
    Thread& thread = b.threads[b.ready[b.next++]];
    if (b.next == b.ready.size()) b.ready.clear(), b.next = 0;
    resume(b, thread);
    if (!b.failure.empty()) break;
  }
  if (b.failure.empty() && b.ended < b.num_threads) {
    const std::string deadlock = describe_deadlock(b);
    b.failure = where(b) + deadlock;
  }
  if (!b.failure.empty()) {
    // Threads that wait are left where they are.
    b.free_stacks.clear();
    for (const auto& stack : b.stacks) b.free_stacks.push_back(stack.get());
  }
}

}  // namespace

std::string describe(const Site& site) {
  const std::string file = site.file;
  const std::size_t slash = file.rfind('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ":" +
         std::to_string(site.line);
}

std::string thread_name(int thread) {
  const Block& b = block();
  const uint3 index = b.threads[thread].index;
  std::ostringstream text;
  if (blockDim.y == 1 && blockDim.z == 1) {
    text << "thread " << index.x;
  } else {
    text << "thread (" << index.x << ", " << index.y << ", " << index.z << ")";
  }
  return text.str();
}

void fail(const std::string& what) {
  Block& b = block();
  b.failure = where(b) + what;
  throw Failed();
}

void fail_without_unwinding(std::string (*what)()) {
  Block& b = block();
  b.failure = where(b) + what();
  leave_for_ever();
}

void barrier(Site site) {
  Block& b = block();
  Thread& me = *b.running;
  me.state = State::kAtBarrier;
  me.site = site;
  if (++b.at_barrier == b.num_threads) {
    for (int t = 0; t < b.num_threads; ++t) {
      if (b.threads[t].site == site) continue;
      fail("__syncthreads() in " + describe(site) + ", but " + thread_name(t) +
           " waits at another in " + describe(b.threads[t].site));
    }
    b.at_barrier = 0;
    ++b.barrier;
    make_ready(b, 0, b.num_threads);
  }
  suspend();
}

void warp_operation(const char* what, void* mine,
                    void (*complete)(const Lanes&), Site site) {
  Block& b = block();
  Thread& me = *b.running;
  me.state = State::kInWarpOperation;
  me.site = site;
  me.what = what;
  me.data = mine;

  const int first = now.thread / kWarpSize * kWarpSize;
  Lanes lanes;
  for (int l = 0; l < kWarpSize; ++l) {
    const Thread& other = b.threads[first + l];
    if (first + l >= b.num_threads || other.state != State::kInWarpOperation ||
        !(other.site == site)) {
      return suspend();
    }
    lanes[l] = other.data;
  }
  // This lane is the last.
  complete(lanes);
  for (int l = 0; l < kWarpSize; ++l) {
    b.threads[first + l].state = State::kReady;
  }
  make_ready(b, first, kWarpSize);
  suspend();
}

bool is_running() { return this_thread_runs; }

std::string run_grid(const Grid& grid) {
  Block& b = block();
  b.grid = &grid;
  b.failure.clear();
  b.home = std::make_unique<FiberStack>();
  b.num_threads = static_cast<int>(grid.block.x * grid.block.y * grid.block.z);
  for (int t = 0; t < b.num_threads; ++t) {
    const unsigned u = static_cast<unsigned>(t);
    b.threads[t].index = {u % grid.block.x, u / grid.block.x % grid.block.y,
                          u / grid.block.x / grid.block.y};
  }
  blockDim = grid.block;
  gridDim = grid.grid;
  b.running = &b.threads[0];

  this_thread_runs = true;
  const std::uint64_t num_blocks =
      std::uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  const Permutation order(num_blocks);
  for (std::uint64_t k = 0; k < num_blocks && b.failure.empty(); ++k) {
    const std::uint64_t i = order(k);
    blockIdx = {static_cast<unsigned>(i % grid.grid.x),
                static_cast<unsigned>(i / grid.grid.x % grid.grid.y),
                static_cast<unsigned>(i / grid.grid.x / grid.grid.y)};
    run_block(b);
  }
  this_thread_runs = false;
  if (b.failure.empty()) {
    const std::string breach = find_breach();
    if (!breach.empty()) b.failure = grid.name + ": " + breach;
  }
  return b.failure;
}

}  // namespace emulator
