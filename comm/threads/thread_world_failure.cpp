// Failures of a world of threads: deadlocks, timeouts, and the first cause.

#include <fmt/format.h>

#include <algorithm>

#include "comm/internal/rank_device.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"

namespace shardbook::internal {

void ThreadWorld::rank_begins(int world_rank) {
  const Lock lock(mutex_);
  rank(world_rank).thread = std::this_thread::get_id();
}

void ThreadWorld::rank_ended(int world_rank) {
  const Lock lock(mutex_);
  rank(world_rank).ended = true;
  if (num_cores_ > 0) check_all_progress();
}

void ThreadWorld::all_sleep() {
  const Lock lock(mutex_);
  check_all_progress();
  if (!failed()) poison(0, "all ranks wait for each other", nullptr);
}

void ThreadWorld::check_all_progress() {
  for (std::size_t r = 0; r < ranks_.size() && !failed(); ++r) {
    const Operation* operation = ranks_[r]->blocked_in;
    if (operation != nullptr && !operation->complete()) {
      check_progress(static_cast<int>(r), *operation);
    }
  }
}

void ThreadWorld::check_progress(int world_rank, const Operation& operation) {
  const std::vector<int> missing = operation.missing();
  for (int other : missing) {
    if (!rank(other).ended) continue;
    const std::string reason = "it ended without joining";
    const std::string text =
        failure_text(other, reason, world_rank, operation.text_of(world_rank));
    poison(other, reason, std::make_exception_ptr(Error(text)));
    return;
  }
  std::vector<bool> seen(ranks_.size(), false);
  std::vector<int> path;
  if (find_cycle(world_rank, world_rank, seen, path)) {
    const std::string text = cycle_text(path);
    poison(world_rank, text, std::make_exception_ptr(Error(text)));
  }
}

// Follows the edges "waits for" from a blocked rank; `path` ends as the cycle.
bool ThreadWorld::find_cycle(int from, int target, std::vector<bool>& seen,
                             std::vector<int>& path) {
  const Rank& blocked = rank(from);
  seen[static_cast<std::size_t>(from)] = true;
  if (blocked.blocked_in == nullptr || blocked.has_several_threads) {
    return false;
  }
  path.push_back(from);
  for (int next : blocked.blocked_in->missing()) {
    if (next == target) return true;
    if (seen[static_cast<std::size_t>(next)]) continue;
    if (find_cycle(next, target, seen, path)) return true;
  }
  path.pop_back();
  return false;
}

std::string ThreadWorld::cycle_text(std::vector<int> path) {
  // The text must not depend on who blocks last
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()),
              path.end());
  std::vector<std::string> waits;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const int next = path[(i + 1) % path.size()];
    const Operation& wait = *rank(path[i]).blocked_in;
    waits.push_back(fmt::format("rank {} waits for rank {} in {}", path[i],
                                next, wait.text_of(path[i])));
    if (wait.is_send_of(path[i])) {
      waits.back() += fmt::format(", which rank {} does not receive yet", next);
    }
  }
  return fmt::format("deadlock: {}", fmt::join(waits, "; "));
}

// A missing rank may itself wait for another one: names the ranks at the end of
// the waits, which wait for no other.
std::string ThreadWorld::timeout_text(const Operation& operation,
                                      int world_rank,
                                      std::chrono::milliseconds timeout) {
  const Operation* late = &operation;
  int waiter = world_rank;
  std::string chain;
  std::vector<bool> seen(ranks_.size(), false);
  const auto waits = [&](int r) {
    const Rank& them = rank(r);
    return them.blocked_in != nullptr && !them.blocked_in->complete() &&
           !them.has_several_threads && !seen[static_cast<std::size_t>(r)];
  };
  for (;;) {
    const std::vector<int> missing = late->missing();
    const auto next = std::find_if(missing.begin(), missing.end(), waits);
    if (next == missing.end()) break;
    seen[static_cast<std::size_t>(*next)] = true;
    chain = fmt::format("; rank {} waits for rank {} in {}{}", waiter, *next,
                        late->text_of(waiter), chain);
    waiter = *next;
    late = rank(waiter).blocked_in;
  }
  return fmt::format(
      "timeout after {} ms: rank {} did not join {}, in which rank {} waits{}",
      timeout.count(), fmt::join(late->missing(), " rank "),
      late->text_of(waiter), waiter, chain);
}

void ThreadWorld::fail(int world_rank, const std::string& reason,
                       std::exception_ptr cause) {
  const Lock lock(mutex_);
  poison(world_rank, reason, std::move(cause));
}

void ThreadWorld::fail(int world_rank) {
  fail(world_rank, current_reason(), std::current_exception());
}

void ThreadWorld::poison(int world_rank, const std::string& reason,
                         std::exception_ptr cause) {
  if (failed()) return;  // only the first cause counts
  failed_rank_ = world_rank;
  failure_reason_ = reason;
  first_cause_ = std::move(cause);
  failed_.store(true, std::memory_order_release);
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    sleeper_->wake(static_cast<int>(r));
  }
}

void ThreadWorld::poison_and_throw(int world_rank, const std::string& reason) {
  const Error error(reason);
  poison(world_rank, reason, std::make_exception_ptr(error));
  throw error;
}

std::string ThreadWorld::failure_text(int failed, const std::string& reason,
                                      int world_rank, const std::string& call) {
  return fmt::format("rank {} failed: {} (while rank {} was in {})", failed,
                     reason, world_rank, call);
}

std::exception_ptr ThreadWorld::first_cause() const {
  const Lock lock(mutex_);
  return first_cause_;
}

}  // namespace shardbook::internal
