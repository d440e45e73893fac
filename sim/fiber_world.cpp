#include "sim/fiber_world.h"

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm/threads/thread_group.h"
#include "core/check.h"
#include "core/context.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace shardbook::sim {
namespace {

namespace context = boost::context;

// Pages are allocated when touched, so the size costs addresses only.
constexpr std::size_t kStackBytes = 1 << 20;

// The address sanitizer marks the memory around a frame's variables until the
// frame returns. A fiber's first frames never return, so their marks are
// removed before the memory is freed: its next owner may be a file.
class Stacks : public context::protected_fixedsize_stack {
 public:
  Stacks() : context::protected_fixedsize_stack(kStackBytes) {}
  void deallocate(context::stack_context& stack) noexcept {
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(static_cast<char*>(stack.sp) - stack.size,
                                stack.size);
#endif
    context::protected_fixedsize_stack::deallocate(stack);
  }
};

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

// Hands the thread from rank to rank.
class Scheduler : public FiberControl {
 public:
  Scheduler(int num_ranks, std::function<bool()> when_all_wait)
      : ranks_(static_cast<std::size_t>(num_ranks)),
        mine_(nullptr, 0),
        when_all_wait_(std::move(when_all_wait)) {}

  void start(int rank, const std::function<void()>& body) {
    Rank& me = at(rank);
    Stacks stacks;
    const context::stack_context stack = stacks.allocate();
    me.stack = std::make_unique<Switch>(
        static_cast<const char*>(stack.sp) - stack.size, stack.size);
    me.fiber = context::fiber(
        std::allocator_arg, context::preallocated(stack.sp, stack.size, stack),
        stacks, [this, &me, body](context::fiber&& scheduler) {
          me.stack->arrive_from(mine_);
          me.scheduler = std::move(scheduler);
          body();
          me.has_ended = true;
          me.stack->leave_for(mine_, /*ends=*/true);
          return std::move(me.scheduler);
        });
    make_ready(rank);
  }

  // Runs ranks until all have ended; false when all that are left wait.
  bool run() {
    while (!ready_.empty() || (when_all_wait_ && when_all_wait_())) {
      const int rank = ready_.front();
      ready_.pop_front();
      Rank& me = at(rank);
      me.is_ready = false;
      if (me.has_ended) continue;
      RankContext* const context =
          RankContext::exchange(std::exchange(me.context, nullptr));
      mine_.leave_for(*me.stack);
      me.fiber = std::move(me.fiber).resume();
      mine_.arrive_from(*me.stack);
      me.context = RankContext::exchange(context);
    }
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.has_ended; });
  }

  void suspend(int rank) override {
    Rank& me = at(rank);
    me.stack->leave_for(mine_);
    me.scheduler = std::move(me.scheduler).resume();
    me.stack->arrive_from(mine_);
  }

  void make_ready(int rank) override {
    Rank& me = at(rank);
    if (me.is_ready || me.has_ended) return;
    me.is_ready = true;
    ready_.push_back(rank);
  }

 private:
  struct Rank {
    std::unique_ptr<Switch> stack;
    context::fiber fiber;      // where the rank goes on
    context::fiber scheduler;  // where the thread goes when the rank waits
    RankContext* context = nullptr;
    bool is_ready = false;
    bool has_ended = false;
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  std::vector<Rank> ranks_;
  std::deque<int> ready_;
  Switch mine_;
  std::function<bool()> when_all_wait_;
};

class FiberSleeper : public shardbook::internal::Sleeper {
 public:
  explicit FiberSleeper(Scheduler& scheduler) : scheduler_(scheduler) {}
  std::cv_status sleep(int world_rank, std::unique_lock<std::mutex>& lock,
                       std::chrono::steady_clock::time_point) override {
    lock.unlock();
    scheduler_.suspend(world_rank);
    lock.lock();
    return std::cv_status::no_timeout;
  }
  void wake(int world_rank) override { scheduler_.make_ready(world_rank); }
  void yield(int world_rank) override {
    scheduler_.make_ready(world_rank);
    scheduler_.suspend(world_rank);
  }

 private:
  Scheduler& scheduler_;
};

}  // namespace

void run_fibers(int num_ranks, const std::function<void(ProcessGroup&)>& body,
                const LaunchOptions& options, bool on_meta,
                const FiberHooks& hooks) {
  Scheduler scheduler(num_ranks, hooks.when_all_wait);
  if (hooks.begin) hooks.begin(scheduler);
  const auto world = std::make_shared<shardbook::internal::ThreadWorld>(
      num_ranks, /*num_cores=*/0, std::make_unique<FiberSleeper>(scheduler));
  bool any_threw = false;

  const auto run_rank = [&](int r) {
    world->rank_begins(r);
    try {
      const std::int64_t capacity = options.device_memory_bytes;
      RankContext context(
          on_meta ? Device::meta(r, capacity) : Device::cpu(r, capacity), r);
      context.deterministic = options.deterministic;
      const RankContext::Scope scope(context);
      shardbook::internal::ThreadGroup group(world, world->root_group(), r,
                                             options.timeout);
      body(group);
    } catch (const context::detail::forced_unwind&) {
      throw;  // this fiber is being taken down
    } catch (...) {
      any_threw = true;
      world->fail(r);
    }
    world->rank_ended(r);
  };
  for (int r = 0; r < num_ranks; ++r) {
    scheduler.start(r, [&run_rank, r] { run_rank(r); });
  }
  if (!scheduler.run()) {
    world->all_sleep();
    scheduler.run();  // they wake, and throw
  }
  if (any_threw) std::rethrow_exception(world->first_cause());
}

}  // namespace shardbook::sim
