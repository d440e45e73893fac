// Fibers by Boost.Context.

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <utility>

#include "sim/internal/fiber_stack.h"

namespace shardbook::sim {
namespace {

namespace context = boost::context;

class Stacks : public context::protected_fixedsize_stack {
 public:
  Stacks() : context::protected_fixedsize_stack(kStackBytes) {}
  void deallocate(context::stack_context& stack) noexcept {
    forget_frames(static_cast<char*>(stack.sp) - stack.size, stack.size);
    context::protected_fixedsize_stack::deallocate(stack);
  }
};

}  // namespace

struct Fiber::Impl : FiberState {
  context::fiber self;    // where the body goes on
  context::fiber caller;  // where the thread goes when the body suspends

  Impl(std::function<void()> run, context::stack_context stack)
      : FiberState(std::move(run), static_cast<char*>(stack.sp) - stack.size,
                   stack.size),
        self(std::allocator_arg,
             context::preallocated(stack.sp, stack.size, stack), Stacks(),
             [this](context::fiber&& first_caller) {
               caller = std::move(first_caller);
               live();
               return std::move(caller);
             }) {}
};

Fiber::Fiber(std::function<void()> body)
    : impl_(std::make_unique<Impl>(std::move(body), Stacks().allocate())) {}
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber::~Fiber() {
  if (impl_ == nullptr || !impl_->has_begun || impl_->has_ended) return;
  impl_->is_taken_down = true;
  resume();
}

void Fiber::resume() {
  impl_->resume([this] { impl_->self = std::move(impl_->self).resume(); });
}

void Fiber::suspend() {
  impl_->suspend([this] { impl_->caller = std::move(impl_->caller).resume(); });
}

bool Fiber::has_ended() const { return impl_->has_ended; }

}  // namespace shardbook::sim
