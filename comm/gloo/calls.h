#pragma once

// The calls of one group and one rank, one after another in the order of their
// issue.
//
// A call that is waited for at once runs in the waiting thread, if no call is
// before it; otherwise a thread of the group runs it while the rank computes.

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/gloo/gloo_world.h"
#include "comm/work.h"

namespace shardbook::internal {

class CallQueue {
 public:
  explicit CallQueue(GlooWorld& world) : world_(world) {}
  /// Lets the running call end; calls that have not begun do not run.
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// The Work rethrows an exception of `run`.
  static Work enqueue(const std::shared_ptr<CallQueue>& queue,
                      std::function<void()> run);
  /// The Work of a message that is on its way. Messages do not wait for
  /// collectives. `keep` lives until the message is done.
  static Work add_message(const std::shared_ptr<CallQueue>& queue,
                          Message message, std::shared_ptr<void> keep);
  /// Runs the queued calls and waits for all messages.
  void drain();
  /// After a failure: cancels the messages.
  void forget_messages() { messages_.clear(); }
  bool idle();

 private:
  using Call = std::packaged_task<void()>;
  class MessageState;

  void run_until(const std::function<bool()>& is_over);
  void run_front(std::unique_lock<std::mutex>& lock);
  void work();

  GlooWorld& world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;
  bool running_ = false;
  bool stopping_ = false;
  std::thread worker_;
  // Messages not known to be done; used by the issuing thread only.
  std::list<std::shared_ptr<MessageState>> messages_;
};

}  // namespace shardbook::internal
