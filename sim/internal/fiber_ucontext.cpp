// Fibers by the C library's contexts.

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

#include "sim/internal/fiber_stack.h"

namespace shardbook::sim {

// Memory below the stack that may not be touched ends a stack that overflows.
class MappedStack {
 public:
  MappedStack() {
    void* const memory =
        mmap(nullptr, bytes(), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    mprotect(memory_, guard_, PROT_NONE);
  }
  ~MappedStack() {
    forget_frames(bottom(), kStackBytes);
    munmap(memory_, bytes());
  }
  MappedStack(const MappedStack&) = delete;
  MappedStack& operator=(const MappedStack&) = delete;
  char* bottom() const { return memory_ + guard_; }

 private:
  std::size_t bytes() const { return kStackBytes + guard_; }

  const std::size_t guard_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  char* memory_ = nullptr;
};

namespace {

// makecontext passes numbers of 32 bits.
void run_body(unsigned high, unsigned low) {
  const auto address = static_cast<std::uint64_t>(high) << 32 | low;
  reinterpret_cast<FiberState*>(static_cast<std::uintptr_t>(address))->live();
}

}  // namespace

struct Fiber::Impl : MappedStack, FiberState {
  ucontext_t self;    // where the body goes on
  ucontext_t caller;  // where the thread goes when the body suspends or ends

  explicit Impl(std::function<void()> run)
      : FiberState(std::move(run), bottom(), kStackBytes) {
    getcontext(&self);
    self.uc_stack.ss_sp = bottom();
    self.uc_stack.ss_size = kStackBytes;
    self.uc_link = &caller;
    const auto address = static_cast<std::uint64_t>(
        reinterpret_cast<std::uintptr_t>(static_cast<FiberState*>(this)));
    makecontext(&self, reinterpret_cast<void (*)()>(run_body), 2,
                static_cast<unsigned>(address >> 32),
                static_cast<unsigned>(address));
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
  impl_->resume([this] { swapcontext(&impl_->caller, &impl_->self); });
}

void Fiber::suspend() {
  impl_->suspend([this] { swapcontext(&impl_->self, &impl_->caller); });
}

bool Fiber::has_ended() const { return impl_->has_ended; }

}  // namespace shardbook::sim
