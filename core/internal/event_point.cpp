#include "core/internal/event_point.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "core/context.h"

namespace shardbook::internal {

void EventPoint::record(std::exception_ptr error) {
  RankContext& context = RankContext::current();
  for (Observer* observer : context.observers()) {
    observer->on_event_record(context.stream, virtual_time_s_);
  }
  mark(std::move(error));
}

std::exception_ptr EventPoint::wait() const {
  std::exception_ptr error = hold_stream();
  RankContext& context = RankContext::current();
  for (Observer* observer : context.observers()) {
    observer->on_event_wait(context.stream, virtual_time_s_);
  }
  return error;
}

std::exception_ptr EventPoint::synchronize() const {
  std::exception_ptr error = hold_host();
  for (Observer* observer : RankContext::current().observers()) {
    observer->on_event_synchronize(virtual_time_s_);
  }
  return error;
}

namespace {

// On the CPU an operation is done when it returns: the point passes when the
// thread that serves the stream records it.
class HostEventPoint : public EventPoint {
 public:
  bool has_passed() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return passed_;
  }
  double seconds_since(const EventPoint& earlier) const override {
    const auto& from = dynamic_cast<const HostEventPoint&>(earlier);
    return std::chrono::duration<double>(at_ - from.at_).count();
  }

 private:
  void mark(std::exception_ptr error) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    at_ = std::chrono::steady_clock::now();
    passed_ = true;
    changed_.notify_all();
  }
  // The stream is served by the calling thread.
  std::exception_ptr hold_stream() const override { return hold_host(); }
  std::exception_ptr hold_host() const override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
    return error_;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point at_;
};

}  // namespace

// Shapes take no time: meta devices have the host's points.
std::shared_ptr<EventPoint> make_event_point(const Device&) {
  return std::make_shared<HostEventPoint>();
}

}  // namespace shardbook::internal
