#include "comm/gloo/calls.h"

#include <atomic>
#include <utility>

namespace shardbook::internal {

// A message. Gloo can wait but not poll, so the first done() starts a thread
// that waits.
class CallQueue::MessageState : public Work::State {
 public:
  MessageState(GlooWorld& world, Message message, std::shared_ptr<void> keep)
      : world_(world), message_(std::move(message)), keep_(std::move(keep)) {}
  ~MessageState() override {
    if (waiter_.joinable()) waiter_.join();
  }

  void wait() override {
    if (ended_ && !error_) return;
    // Another thread may be waiting for the message already.
    const ControlLine::Wait wait(world_.line());
    const std::lock_guard lock(mutex_);
    if (!ended_) {
      try {
        message_.wait();
      } catch (...) {
        error_ = std::current_exception();
      }
      keep_.reset();
      ended_ = true;
    }
    if (error_) std::rethrow_exception(error_);
  }

  bool done() override {
    if (!ended_ && !waiter_.joinable()) {
      waiter_ = std::thread([this] {
        try {
          wait();
        } catch (...) {
          // Kept in error_ for the next wait.
        }
      });
    }
    return ended_;
  }

  bool ended() const { return ended_; }

 private:
  GlooWorld& world_;
  Message message_;
  std::shared_ptr<void> keep_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::atomic<bool> ended_ = false;
  std::thread waiter_;
};

CallQueue::~CallQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
}

Work CallQueue::enqueue(const std::shared_ptr<CallQueue>& queue,
                        std::function<void()> run) {
  const std::lock_guard lock(queue->mutex_);
  Call& call = queue->calls_.emplace_back([queue = queue.get(), run] {
    try {
      run();
    } catch (const std::exception& error) {
      queue->world_.fail(error.what());
      throw;
    }
  });
  if (!queue->worker_.joinable()) {
    queue->worker_ = std::thread([queue = queue.get()] { queue->work(); });
  }
  queue->changed_.notify_all();
  // A collective is done when it has run.
  const std::shared_future<void> result = call.get_future().share();
  const auto is_done = [result] {
    return result.wait_for(std::chrono::seconds(0)) ==
           std::future_status::ready;
  };
  return Work(
      [queue, result, is_done] {
        queue->run_until(is_done);
        result.get();
      },
      is_done);
}

Work CallQueue::add_message(const std::shared_ptr<CallQueue>& queue,
                            Message message, std::shared_ptr<void> keep) {
  // A message continues after its handle is dropped, so the queue keeps it: at
  // most this many that nobody has waited for.
  constexpr std::size_t kMaxUnwaited = 256;
  auto& messages = queue->messages_;
  messages.remove_if([](const auto& other) { return other->ended(); });
  while (messages.size() >= kMaxUnwaited) {
    const std::shared_ptr<MessageState> oldest = messages.front();
    messages.pop_front();
    oldest->wait();
  }
  auto state = std::make_shared<MessageState>(queue->world_, std::move(message),
                                              std::move(keep));
  messages.push_back(state);
  return Work(std::move(state));
}

void CallQueue::run_front(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  {
    Call call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call();
  }  // releases the tensors
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

void CallQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock,
                  [&] { return stopping_ || (!running_ && !calls_.empty()); });
    if (stopping_) return;
    run_front(lock);
  }
}

void CallQueue::run_until(const std::function<bool()>& is_over) {
  std::unique_lock lock(mutex_);
  while (!is_over()) {
    if (!running_ && !calls_.empty()) {
      run_front(lock);
    } else {
      const ControlLine::Wait wait(world_.line());
      changed_.wait(lock);
    }
  }
}

void CallQueue::drain() {
  run_until([this] { return !running_ && calls_.empty(); });
  const auto messages = std::exchange(messages_, {});
  for (const auto& message : messages) message->wait();
}

bool CallQueue::idle() {
  const std::lock_guard lock(mutex_);
  return !running_ && calls_.empty() && messages_.empty();
}

}  // namespace shardbook::internal
