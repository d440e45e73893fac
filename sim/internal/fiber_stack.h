#pragma once

// What every body of a fiber needs: its state, and what sanitizers must know.

#include <cstddef>
#include <functional>
#include <utility>

#include "sim/internal/fiber.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace shardbook::sim {

// Pages are allocated when touched, so the size costs addresses only.
constexpr std::size_t kStackBytes = 1 << 20;

// The address sanitizer marks the memory around a frame's variables until the
// frame returns. A fiber's first frames never return, so their marks are
// removed before the memory is freed: its next owner may be a file.
inline void forget_frames([[maybe_unused]] void* bottom,
                          [[maybe_unused]] std::size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(bottom, bytes);
#endif
}

// Sanitizers watch stacks and threads, and must learn of each change.
class Switch {
 public:
  // `bottom`, `bytes`: this fiber's stack; none for the thread's own.
  Switch(const void* bottom, std::size_t bytes)
      : bottom_(bottom), bytes_(bytes) {
#ifdef __SANITIZE_THREAD__
    thread_fiber_ =
        bottom == nullptr ? __tsan_get_current_fiber() : __tsan_create_fiber(0);
#endif
  }
  ~Switch() {
#ifdef __SANITIZE_THREAD__
    if (bottom_ != nullptr) __tsan_destroy_fiber(thread_fiber_);
#endif
  }
  Switch(const Switch&) = delete;
  Switch& operator=(const Switch&) = delete;

  // Call before the thread leaves this stack for `other`'s (`ends`: for good).
  void leave_for([[maybe_unused]] const Switch& other,
                 [[maybe_unused]] bool ends = false) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack_, other.bottom_,
                                   other.bytes_);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(other.thread_fiber_, 0);
#endif
  }
  // Call when the thread has arrived from `other`'s stack.
  void arrive_from([[maybe_unused]] Switch& other) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack_, &other.bottom_, &other.bytes_);
#endif
  }

 private:
  const void* bottom_;
  std::size_t bytes_;
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack_ = nullptr;
#endif
#ifdef __SANITIZE_THREAD__
  void* thread_fiber_ = nullptr;
#endif
};

struct FiberState {
  std::function<void()> body;
  Switch mine, resumer{nullptr, 0};
  bool has_begun = false, has_ended = false, is_taken_down = false;

  FiberState(std::function<void()> run, const void* bottom, std::size_t bytes)
      : body(std::move(run)), mine(bottom, bytes) {}

  // The whole life of a body, on its own stack.
  void live() {
    mine.arrive_from(resumer);
    try {
      body();
    } catch (const Fiber::TakenDown&) {
    }
    has_ended = true;
    mine.leave_for(resumer, /*ends=*/true);
  }
  // Around the jump to the body and the jump back. Jump: void().
  template <typename Jump>
  void resume(const Jump& jump) {
    has_begun = true;
    resumer.leave_for(mine);
    jump();
    resumer.arrive_from(mine);
  }
  template <typename Jump>
  void suspend(const Jump& jump) {
    mine.leave_for(resumer);
    jump();
    mine.arrive_from(resumer);
    if (is_taken_down) throw Fiber::TakenDown();
  }
};

}  // namespace shardbook::sim
