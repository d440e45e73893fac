#pragma once

// The threads of a block, as fibers: each has a stack of its own and runs until
// it must wait. boost::context does the change of stacks; what is built here on
// it may be left in the middle and forgotten, which a thread is whose kernel has
// failed.

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <memory>
#include <vector>

/// The thread sanitizer keeps the calls of each fiber. A function that is called
/// on one fiber and returns on another, or never, must not be among them.
#define EMULATOR_CHANGES_FIBERS __attribute__((no_sanitize_thread))

namespace emulator {

/// Where the host thread itself runs, or a stack of the pool.
class FiberStack {
 public:
  FiberStack();               ///< the host thread's own stack
  explicit FiberStack(bool);  ///< a new one, with a guard page below
  ~FiberStack();
  FiberStack(const FiberStack&) = delete;
  FiberStack& operator=(const FiberStack&) = delete;

  /// Makes the stack ready to call `entry`, whatever lies on it.
  boost::context::detail::fcontext_t prepare(
      void (*entry)(boost::context::detail::transfer_t));

  // Sanitizers watch stacks and threads, and must be told of each change: call
  // the first before the jump to `other`, the second after arriving from there.
  EMULATOR_CHANGES_FIBERS void leave_for(FiberStack& other, bool ends = false);
  void arrive_from(FiberStack& other);

 private:
  char* memory_ = nullptr;  // with the guard page
  std::size_t bytes_ = 0;
  const void* bottom_ = nullptr;
  std::size_t usable_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* thread_ = nullptr;
};

}  // namespace emulator
