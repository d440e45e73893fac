// Starts the ranks of the threads backend and ends them together.

#include <algorithm>
#include <thread>
#include <vector>

#include "comm/internal/cores.h"
#include "comm/internal/rank_device.h"
#include "comm/threads/thread_group.h"
#include "core/context.h"

namespace shardbook::internal {
namespace {

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

void run_thread_ranks(int world_size,
                      const std::function<void(ProcessGroup&)>& body,
                      const LaunchOptions& options) {
  const int cores = available_cores();
  const auto world = std::make_shared<ThreadWorld>(world_size, cores);
  std::atomic<bool> any_threw{false};

  const auto run_rank = [&](int r) {
    world->rank_begins(r);
    try {
      RankContext context(
          rank_device(r, r, world_size, options.device == "cuda", options), r,
          std::max(1, cores / world_size));
      context.deterministic = options.deterministic;
      const RankContext::Scope scope(context);
      ThreadGroup group(world, world->root_group(), r, options.timeout);
      body(group);
    } catch (...) {
      any_threw = true;
      const std::exception_ptr failure = std::current_exception();
      world->fail(r, reason_of(failure), failure);
    }
    world->rank_ended(r);
  };

  std::vector<std::thread> ranks;
  try {
    for (int r = 0; r < world_size; ++r) ranks.emplace_back(run_rank, r);
  } catch (...) {
    // The system gives no more threads: those that run must not wait for them.
    world->fail(static_cast<int>(ranks.size()), "its thread did not start",
                std::current_exception());
    any_threw = true;
  }
  for (std::thread& thread : ranks) thread.join();
  if (any_threw) std::rethrow_exception(world->first_cause());
}

}  // namespace shardbook::internal
