#pragma once

// The threads of one block: what kernels see of it (barriers, warps), and what
// the instrumented arrays ask about the thread that runs.

#include <array>
#include <cstdint>
#include <string>

namespace emulator {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;

/// A line of a kernel.
struct Site {
  const char* file;
  int line;
  bool operator==(const Site& other) const {
    return line == other.line &&
           (file == other.file || std::string(file) == other.file);
  }
};
std::string describe(const Site& site);

/// The time of a block is counted in barriers. The count goes on from block to
/// block, so what an earlier block left behind is seen to be old.
struct Moment {
  std::uint32_t barrier = 0;
  std::uint16_t thread = 0;
};

/// The thread that runs now.
extern Moment now;
/// The first moment of the block that runs now.
extern std::uint32_t block_begin;

/// True when the access at `before` is over for the thread that runs: that
/// thread made it, or a barrier lies between.
inline bool is_ordered(const Moment& before) {
  return before.barrier != now.barrier || before.thread == now.thread;
}

/// Ends the kernel: the failure is reported with its block and this thread.
[[noreturn]] void fail(const std::string& what);
/// The same where the stack cannot be unwound; it is left as it is.
[[noreturn]] void fail_without_unwinding(std::string (*what)());
/// "thread 5" or "thread (5, 1, 0)".
std::string thread_name(int thread);

/// __syncthreads().
void barrier(Site site);

/// A warp operation: waits until all lanes have come to it. The last to come
/// calls `complete` with what each lane brought, then all go on.
using Lanes = std::array<void*, kWarpSize>;
void warp_operation(const char* what, void* mine,
                    void (*complete)(const Lanes&), Site site);
/// The lane of the thread that runs.
inline int lane() { return now.thread % kWarpSize; }

struct Grid;
/// Runs all blocks; returns what went wrong, or nothing.
std::string run_grid(const Grid& grid);
/// True while the calling host thread runs a kernel.
bool is_running();

}  // namespace emulator
