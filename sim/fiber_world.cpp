#include "sim/fiber_world.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm/threads/thread_group.h"
#include "core/check.h"
#include "core/context.h"
#include "sim/internal/fiber.h"

namespace shardbook::sim {
namespace {

// Hands the thread from rank to rank. One rank alone needs no stack of its own:
// it stays on the caller's, and where it waits, the network goes on at once.
class Scheduler : public FiberControl {
 public:
  explicit Scheduler(std::function<bool()> when_all_wait)
      : when_all_wait_(std::move(when_all_wait)) {}

  // Runs rank 0; call `wake_all` where it would wait forever.
  void run_alone(const std::function<void()>& body,
                 std::function<void()> wake_all) {
    wake_all_ = std::move(wake_all);
    body();
  }

  // Call for rank 0, 1, ...
  void start(std::function<void()> body) {
    ranks_.push_back({Fiber(std::move(body))});
    make_ready(static_cast<int>(ranks_.size()) - 1);
  }

  // Runs ranks until all have ended; false when all that are left wait.
  bool run() {
    while (!ready_.empty() || (when_all_wait_ && when_all_wait_())) {
      const int rank = ready_.front();
      ready_.pop_front();
      Rank& me = at(rank);
      me.is_ready = false;
      if (me.fiber.has_ended()) continue;
      RankContext* const context =
          RankContext::exchange(std::exchange(me.context, nullptr));
      me.fiber.resume();
      me.context = RankContext::exchange(context);
    }
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.fiber.has_ended(); });
  }

  void suspend(int rank) override {
    if (!wake_all_) return at(rank).fiber.suspend();
    while (!alone_is_ready_) {
      if (when_all_wait_ && when_all_wait_()) continue;
      wake_all_();
      SB_CHECK(alone_is_ready_, "sim: rank 0 waits, and nothing wakes it");
    }
    alone_is_ready_ = false;
  }

  void make_ready(int rank) override {
    if (wake_all_) {
      alone_is_ready_ = true;
      return;
    }
    Rank& me = at(rank);
    if (me.is_ready || me.fiber.has_ended()) return;
    me.is_ready = true;
    ready_.push_back(rank);
  }

 private:
  struct Rank {
    Fiber fiber;
    RankContext* context = nullptr;
    bool is_ready = false;
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  std::vector<Rank> ranks_;
  std::deque<int> ready_;
  std::function<bool()> when_all_wait_;
  std::function<void()> wake_all_;  // where one rank runs alone
  bool alone_is_ready_ = false;
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
  Scheduler scheduler(hooks.when_all_wait);
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
    } catch (const Fiber::TakenDown&) {
      throw;  // this fiber is being taken down
    } catch (...) {
      any_threw = true;
      world->fail(r);
    }
    world->rank_ended(r);
  };
  if (num_ranks == 1) {
    scheduler.run_alone([&] { run_rank(0); }, [&] { world->all_sleep(); });
  } else {
    for (int r = 0; r < num_ranks; ++r) {
      scheduler.start([&run_rank, r] { run_rank(r); });
    }
    if (!scheduler.run()) {
      world->all_sleep();
      scheduler.run();  // they wake, and throw
    }
  }
  if (any_threw) std::rethrow_exception(world->first_cause());
}

}  // namespace shardbook::sim
