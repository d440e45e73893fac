#include "comm/gloo/calls.h"

#include <atomic>
#include <utility>

namespace shardbook::internal {

struct CallQueue::Call {
  std::function<void()> run;
  std::exception_ptr error;
  bool done = false;
};

// A collective: done when it has run.
class CallQueue::CallState : public Work::State {
 public:
  CallState(std::shared_ptr<CallQueue> queue, std::shared_ptr<Call> call)
      : queue_(std::move(queue)), call_(std::move(call)) {}
  void wait() override { queue_->wait(call_); }
  bool done() override { return queue_->done(call_); }

 private:
  std::shared_ptr<CallQueue> queue_;
  std::shared_ptr<Call> call_;
};

// A message. Gloo can only be asked by waiting, so the first done() starts a
// thread that waits.
class CallQueue::MessageState : public Work::State {
 public:
  MessageState(GlooWorld& world, CallInfo info, Message message,
               std::shared_ptr<void> keep)
      : world_(world),
        info_(std::move(info)),
        message_(std::move(message)),
        keep_(std::move(keep)) {}
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
        message_.wait(info_);
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
  CallInfo info_;
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
  return Work(std::make_shared<CallState>(queue, queue->add(std::move(run))));
}

Work CallQueue::add_message(const std::shared_ptr<CallQueue>& queue,
                            CallInfo info, Message message,
                            std::shared_ptr<void> keep) {
  // A message goes on without its handle, so the queue keeps it, and at most so
  // many that nobody has waited for.
  constexpr std::size_t kMaxUnwaited = 256;
  auto& messages = queue->messages_;
  messages.remove_if([](const auto& other) { return other->ended(); });
  while (messages.size() >= kMaxUnwaited) {
    const std::shared_ptr<MessageState> oldest = messages.front();
    messages.pop_front();
    oldest->wait();
  }
  auto state = std::make_shared<MessageState>(
      queue->world_, std::move(info), std::move(message), std::move(keep));
  messages.push_back(state);
  return Work(std::move(state));
}

std::shared_ptr<CallQueue::Call> CallQueue::add(std::function<void()> run) {
  auto call = std::make_shared<Call>();
  call->run = std::move(run);
  const std::lock_guard lock(mutex_);
  calls_.push_back(call);
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
  return call;
}

void CallQueue::run_front(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Call> call = calls_.front();
  calls_.pop_front();
  running_ = true;
  lock.unlock();
  try {
    call->run();
  } catch (const std::exception& error) {
    call->error = std::current_exception();
    world_.fail(error.what());
  }
  call->run = nullptr;  // lets go of the tensors
  lock.lock();
  running_ = false;
  call->done = true;
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

void CallQueue::wait(const std::shared_ptr<Call>& call) {
  std::unique_lock lock(mutex_);
  while (!call->done) {
    if (!running_ && !calls_.empty()) {
      run_front(lock);
    } else {
      const ControlLine::Wait wait(world_.line());
      changed_.wait(lock);
    }
  }
  if (call->error) std::rethrow_exception(call->error);
}

bool CallQueue::done(const std::shared_ptr<Call>& call) {
  const std::lock_guard lock(mutex_);
  return call->done;
}

void CallQueue::drain() {
  std::unique_lock lock(mutex_);
  while (running_ || !calls_.empty()) {
    if (!running_) {
      run_front(lock);
    } else {
      const ControlLine::Wait wait(world_.line());
      changed_.wait(lock);
    }
  }
  lock.unlock();
  const auto messages = std::exchange(messages_, {});
  for (const auto& message : messages) message->wait();
}

void CallQueue::forget_messages() { messages_.clear(); }

bool CallQueue::idle() {
  const std::lock_guard lock(mutex_);
  return !running_ && calls_.empty() && messages_.empty();
}

}  // namespace shardbook::internal
