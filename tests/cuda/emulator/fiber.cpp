#include "tests/cuda/emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include "core/check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {
namespace {

// Pages are allocated when touched. A signal's frame lies here as well.
constexpr std::size_t kStackBytes = 128 << 10;

}  // namespace

FiberStack::FiberStack() {
#ifdef __SANITIZE_THREAD__
  thread_ = __tsan_get_current_fiber();
#endif
}

FiberStack::FiberStack(bool) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  bytes_ = kStackBytes + page;
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  SB_CHECK(memory != MAP_FAILED, "emulator: no memory for stacks");
  memory_ = static_cast<char*>(memory);
  mprotect(memory_, page, PROT_NONE);
  bottom_ = memory_ + page;
  usable_ = kStackBytes;
#ifdef __SANITIZE_THREAD__
  thread_ = __tsan_create_fiber(0);
#endif
}

FiberStack::~FiberStack() {
  if (memory_ == nullptr) return;
#ifdef __SANITIZE_THREAD__
  __tsan_destroy_fiber(thread_);
#endif
  munmap(memory_, bytes_);
}

boost::context::detail::fcontext_t FiberStack::prepare(
    void (*entry)(boost::context::detail::transfer_t)) {
#ifdef __SANITIZE_ADDRESS__
  // A fiber never returns from its first frames. What the sanitizer marked
  // around their variables would stay.
  ASAN_UNPOISON_MEMORY_REGION(bottom_, usable_);
  fake_stack_ = nullptr;
#endif
  return boost::context::detail::make_fcontext(memory_ + bytes_, usable_,
                                               entry);
}

void FiberStack::leave_for([[maybe_unused]] FiberStack& other,
                           [[maybe_unused]] bool ends) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack_, other.bottom_,
                                 other.usable_);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(other.thread_, 0);
#endif
}

void FiberStack::arrive_from([[maybe_unused]] FiberStack& other) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack_, &other.bottom_, &other.usable_);
#endif
}

}  // namespace emulator
