#include "sim/fiber_world.h"

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <deque>
#include <utility>
#include <vector>

#include "comm/threads/thread_group.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::sim {
namespace {

namespace context = boost::context;

// Pages are taken when they are touched, so that the size costs addresses only.
constexpr std::size_t kStackBytes = 512 << 10;

// Hands the thread from rank to rank.
class Scheduler {
 public:
  explicit Scheduler(int num_ranks)
      : ranks_(static_cast<std::size_t>(num_ranks)) {}

  void start(int rank, const std::function<void()>& body) {
    Rank& me = at(rank);
    me.fiber = context::fiber(
        std::allocator_arg, context::protected_fixedsize_stack(kStackBytes),
        [this, rank, body](context::fiber&& scheduler) {
          at(rank).scheduler = std::move(scheduler);
          body();
          at(rank).has_ended = true;
          return std::move(at(rank).scheduler);
        });
    make_ready(rank);
  }

  // Until all have ended. False when all that are left wait.
  bool run() {
    while (!ready_.empty()) {
      const int rank = ready_.front();
      ready_.pop_front();
      Rank& me = at(rank);
      me.is_ready = false;
      if (me.has_ended) continue;
      RankContext* const mine =
          RankContext::exchange(std::exchange(me.context, nullptr));
      me.fiber = std::move(me.fiber).resume();
      me.context = RankContext::exchange(mine);
    }
    for (const Rank& rank : ranks_) {
      if (!rank.has_ended) return false;
    }
    return true;
  }

  void suspend(int rank) {
    Rank& me = at(rank);
    me.scheduler = std::move(me.scheduler).resume();
  }

  void make_ready(int rank) {
    Rank& me = at(rank);
    if (me.is_ready || me.has_ended) return;
    me.is_ready = true;
    ready_.push_back(rank);
  }

 private:
  struct Rank {
    context::fiber fiber;      // where to go on
    context::fiber scheduler;  // where to go when it waits
    RankContext* context = nullptr;
    bool is_ready = false;
    bool has_ended = false;
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  std::vector<Rank> ranks_;
  std::deque<int> ready_;
};

class FiberSleeper : public internal::Sleeper {
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

std::string reason_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

void run_fibers(int num_ranks, const std::function<void(ProcessGroup&)>& body,
                const LaunchOptions& options, bool on_meta) {
  Scheduler scheduler(num_ranks);
  const auto world = std::make_shared<internal::ThreadWorld>(
      num_ranks, /*num_cores=*/0, std::make_unique<FiberSleeper>(scheduler));
  bool any_threw = false;

  const auto run_rank = [&](int r) {
    world->rank_begins(r);
    std::exception_ptr failure;
    try {
      const std::int64_t capacity = options.device_memory_bytes;
      RankContext context(
          on_meta ? Device::meta(r, capacity) : Device::cpu(r, capacity), r);
      context.deterministic = options.deterministic;
      const RankContext::Scope scope(context);
      internal::ThreadGroup group(world, world->root_group(), r,
                                  options.timeout);
      body(group);
    } catch (const context::detail::forced_unwind&) {
      throw;  // this fiber is being taken down
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) {
      any_threw = true;
      world->fail(r, reason_of(failure), failure);
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
