#pragma once

// A function that can stop in its middle and hand the thread back. The build
// chooses its body: fiber_boost.cpp (Boost.Context, which saves registers
// alone), fiber_ucontext.cpp (the C library's contexts, which also save the
// signal mask, by a system call each) or fiber_none.cpp.

#include <functional>
#include <memory>

#include "core/check.h"

namespace shardbook::sim {

/// Thrown by a build without fibers (fiber_none.cpp) where several ranks run.
class NoFibers : public Error {
 public:
  using Error::Error;
};

class Fiber {
 public:
  /// `body` begins at the first resume, on a stack of 1 MiB of which only the
  /// pages that it touches take memory. It throws nothing but TakenDown.
  explicit Fiber(std::function<void()> body);
  /// A body that has begun and not ended is resumed once more: its suspend
  /// throws TakenDown.
  ~Fiber();
  Fiber(Fiber&&) noexcept;

  /// What the last suspend of a body throws: catch it only to throw it on.
  struct TakenDown {};

  /// The thread runs the body until that suspends or ends.
  void resume();
  /// Call inside the body: hands the thread back to its resume.
  void suspend();
  bool has_ended() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardbook::sim
