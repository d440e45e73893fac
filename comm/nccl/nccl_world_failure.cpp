// How a rank of backend nccl learns of a failure, and ends the calls on its
// device.

#include <chrono>
#include <exception>

#include "comm/nccl/nccl_messages.h"
#include "comm/nccl/nccl_world.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

using std::chrono::milliseconds;

// The watchdog's intervals: while messages wait to be issued; and for events
// and communicators.
constexpr milliseconds kMessageTick{1};
constexpr milliseconds kTick{50};

}  // namespace

void NcclWorld::check(const std::string& text) {
  {
    const Lock lock(mutex_);
    if (!has_failed_) return;
  }
  throw_failure(text);
}

void NcclWorld::throw_failure(const std::string& text) {
  throw RunError(line_->failure() + " (while rank " + std::to_string(rank_) +
                 " was in " + text + ")");
}

void NcclWorld::fail(const std::string& reason) {
  if (line_->failure().empty()) line_->fail(reason);
}

void NcclWorld::give_up(const std::string& reason) {
  fail(reason);
  Lock lock(mutex_);
  has_failed_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return is_aborted_; });
}

void NcclWorld::abort_all() {
  // Abort all at once: one may wait for a call that is queued behind another's
  // kernel. Children that wait for their parents come after them.
  try {
    library_.begin_group();
    for (const Communicator& communicator : communicators_) {
      communicator->abort();
    }
    library_.end_group();
  } catch (const Error&) {
    // The device failed; nothing more can be ended.
  }
  is_aborted_ = true;
  changed_.notify_all();
}

void NcclWorld::watch() {
  runtime_.use(gpu_.index());
  Lock lock(mutex_);
  auto last_look = std::chrono::steady_clock::now();
  while (!is_stopping_) {
    if (has_failed_) {
      if (!is_aborted_) abort_all();
      changed_.wait(lock);
      continue;
    }
    std::string wrong;
    try {
      messages_->advance();
      const auto now = std::chrono::steady_clock::now();
      if (now - last_look >= kTick) {
        end_finished();
        // Throws the error of a call in flight
        for (const Communicator& each : communicators_) each->is_ready();
        last_look = now;
      }
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    if (!wrong.empty()) {
      lock.unlock();
      fail(wrong);
      lock.lock();
      has_failed_ = true;
      changed_.notify_all();
      continue;
    }
    changed_.wait_for(lock, messages_->has_waiting() ? kMessageTick : kTick);
  }
}

}  // namespace shardbook::internal
