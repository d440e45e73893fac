// Fibers of WebAssembly, by emscripten's Asyncify: it writes the calls of a stack
// that stops into memory, and calls them again when it goes on.

#include <emscripten/fiber.h>

#include <vector>

#include "sim/internal/fiber_stack.h"

namespace shardbook::sim {
namespace {

// The memory of WebAssembly is touched when it is allocated.
constexpr std::size_t kStack = 256 << 10, kCalls = 64 << 10;

}  // namespace

struct Fiber::Impl : FiberState {
  std::vector<char> stack, calls, calls_of_caller;
  emscripten_fiber_t self;    // where the body goes on
  emscripten_fiber_t caller;  // where the thread goes when the body suspends

  explicit Impl(std::function<void()> run)
      : FiberState(std::move(run), nullptr, 0),
        stack(kStack),
        calls(kCalls),
        calls_of_caller(kCalls) {
    emscripten_fiber_init(
        &self,
        [](void* impl) {
          auto& mine = *static_cast<Impl*>(impl);
          mine.live();
          emscripten_fiber_swap(&mine.self, &mine.caller);
        },
        this, stack.data(), stack.size(), calls.data(), calls.size());
  }
};

Fiber::Fiber(std::function<void()> body)
    : impl_(std::make_unique<Impl>(std::move(body))) {}
Fiber::Fiber(Fiber&&) noexcept = default;
Fiber::~Fiber() {
  if (impl_ == nullptr || !impl_->has_begun || impl_->has_ended) return;
  impl_->is_taken_down = true;
  resume();
}

void Fiber::resume() {
  impl_->resume([this] {
    emscripten_fiber_init_from_current_context(&impl_->caller,
                                               impl_->calls_of_caller.data(),
                                               impl_->calls_of_caller.size());
    emscripten_fiber_swap(&impl_->caller, &impl_->self);
  });
}

void Fiber::suspend() {
  impl_->suspend(
      [this] { emscripten_fiber_swap(&impl_->self, &impl_->caller); });
}

bool Fiber::has_ended() const { return impl_->has_ended; }

}  // namespace shardbook::sim
