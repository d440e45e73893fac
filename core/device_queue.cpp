#include "core/device_queue.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/internal/event_point.h"

namespace shardbook {

class DeviceQueue::State {
 public:
  State(const Device& device, int num_threads, int stream)
      : context_(device, /*rank=*/0, num_threads) {
    context_.stream = stream;
    if (!device.is_meta()) thread_ = std::thread([this] { run(); });
  }
  ~State() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  const Device& device() const { return context_.device; }

  /// A task gets the queue's error so far (null for none) and returns its error
  /// from then on.
  using Task = std::function<std::exception_ptr(std::exception_ptr)>;
  void push(Task task) {
    Item item{std::move(task), RankContext::current()};
    if (!thread_.joinable()) {
      RankContext::Scope scope(context_);
      execute(item);
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
    changed_.notify_all();
  }

 private:
  struct Item {
    Task task;
    RankSettings settings;  ///< of the thread that gave the task
  };

  // Only the thread that executes touches error_: on meta that is the caller.
  void execute(Item& item) {
    static_cast<RankSettings&>(context_) = item.settings;
    error_ = item.task(error_);
    item.task = nullptr;
  }

  void run() {
    RankContext::Scope scope(context_);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !items_.empty() || stopping_; });
      if (items_.empty()) return;
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      execute(item);
      lock.lock();
    }
  }

  RankContext context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

DeviceQueue::DeviceQueue(const Device& device, int num_threads, int stream)
    : state_(std::make_shared<State>(device, num_threads, stream)) {}

DeviceQueue::~DeviceQueue() = default;

const Device& DeviceQueue::device() const { return state_->device(); }

void DeviceQueue::enqueue(Work work) {
  state_->push([work = std::move(work)](
                   std::exception_ptr error) mutable -> std::exception_ptr {
    if (error == nullptr) {
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
    }
    // Memory goes back before anything that waits for this work goes on.
    work = nullptr;
    return error;
  });
}

void DeviceQueue::synchronize() {
  QueueEvent end;
  end.record(*this);
  // The next work starts without the error.
  state_->push([](std::exception_ptr) { return nullptr; });
  end.synchronize();
}

void synchronize(const std::vector<DeviceQueue*>& queues) {
  std::exception_ptr first;
  for (DeviceQueue* queue : queues) {
    try {
      queue->synchronize();
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

void QueueEvent::record(DeviceQueue& queue) {
  point_ = internal::make_event_point(queue.device());
  queue.state_->push([point = point_](std::exception_ptr error) {
    point->record(error);
    return error;
  });
}

void QueueEvent::wait(DeviceQueue& queue) const {
  if (point_ == nullptr) return;
  queue.state_->push([point = point_](std::exception_ptr error) {
    const std::exception_ptr theirs = point->wait();
    return error != nullptr ? error : theirs;
  });
}

}  // namespace shardbook
