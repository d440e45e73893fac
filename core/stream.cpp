#include "core/stream.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/internal/device_runtime.h"
#include "core/internal/event_point.h"

namespace shardbook {

namespace internal {

void EventPoint::record(std::exception_ptr error) {
  RankContext& context = RankContext::current();
  for (const auto& observer : context.observers()) {
    observer->on_event_record(context.stream, time_);
  }
  mark(std::move(error));
}

std::exception_ptr EventPoint::wait() const {
  std::exception_ptr error = hold_stream();
  RankContext& context = RankContext::current();
  for (const auto& observer : context.observers()) {
    observer->on_event_wait(context.stream, time_);
  }
  return error;
}

std::exception_ptr EventPoint::synchronize() const {
  std::exception_ptr error = hold_host();
  for (const auto& observer : RankContext::current().observers()) {
    observer->on_event_synchronize(time_);
  }
  return error;
}

namespace {

// Recorded once; several threads may wait until it is.
class RecordedPoint : public EventPoint {
 public:
  bool is_recorded() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }

 protected:
  void set_recorded(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    recorded_ = true;
    changed_.notify_all();
  }
  std::exception_ptr wait_until_recorded() const {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return recorded_; });
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool recorded_ = false;
  std::exception_ptr error_;
};

// On the CPU an operation is done when it returns: the point passes when the
// thread that serves the stream records it.
class HostEventPoint : public RecordedPoint {
 public:
  bool has_passed() const override { return is_recorded(); }
  double seconds_since(const EventPoint& earlier) const override {
    const auto& from = dynamic_cast<const HostEventPoint&>(earlier);
    return std::chrono::duration<double>(at_ - from.at_).count();
  }

 private:
  void mark(std::exception_ptr error) override {
    at_ = std::chrono::steady_clock::now();
    set_recorded(std::move(error));
  }
  // The stream is served by the calling thread.
  std::exception_ptr hold_stream() const override { return hold_host(); }
  std::exception_ptr hold_host() const override {
    return wait_until_recorded();
  }

  std::chrono::steady_clock::time_point at_;
};

// On CUDA the device passes the point some time after it was recorded. A host
// thread that waits for a stream waits only until the point is recorded.
class CudaEventPoint : public RecordedPoint {
 public:
  explicit CudaEventPoint(const Device& device)
      : device_(device), cuda_(cuda_device(device)) {
    cuda_.runtime().use(cuda_.index());
    event_ = cuda_.runtime().make_event();
  }
  ~CudaEventPoint() override {
    try {
      cuda_.runtime().destroy_event(event_);
    } catch (const Error&) {
      // The device failed; every wait for it throws the error.
    }
  }

  bool has_passed() const override {
    cuda_.refuse_recording("the host asks for an event");
    return is_recorded() && cuda_.runtime().event_has_passed(event_);
  }
  double seconds_since(const EventPoint& earlier) const override {
    const auto& from = dynamic_cast<const CudaEventPoint&>(earlier);
    return cuda_.runtime().seconds_between(from.event_, event_);
  }

 private:
  void mark(std::exception_ptr error) override {
    void* const stream = cuda_.stream(RankContext::current().stream);
    cuda_.runtime().record_event(event_, stream);
    set_recorded(std::move(error));
  }
  std::exception_ptr hold_stream() const override {
    const RankContext& context = RankContext::current();
    // Later work may read host memory
    if (!context.device.is_cuda()) return hold_host();
    std::exception_ptr error = wait_until_recorded();
    CudaDevice& waiting = cuda_device(context.device);
    void* const stream = waiting.stream(context.stream);
    waiting.runtime().hold_stream(stream, event_);
    return error;
  }
  // Throws errors that kernels have found.
  std::exception_ptr hold_host() const override {
    cuda_.refuse_recording("the host waits for an event");
    std::exception_ptr error = wait_until_recorded();
    cuda_.runtime().synchronize_event(event_);
    RankContext& context = RankContext::current();
    cuda_.runtime().check_kernels(context.kernels(device_));
    return error;
  }

  const Device device_;  // lives as long as the event
  CudaDevice& cuda_;
  void* event_ = nullptr;
};

}  // namespace

// Shapes take no time: meta devices use the host's points.
std::shared_ptr<EventPoint> make_event_point(const Device& device) {
  const Device gpu = gpu_of(device);
  if (gpu.defined()) return std::make_shared<CudaEventPoint>(gpu);
  return std::make_shared<HostEventPoint>();
}

}  // namespace internal

namespace {

void rethrow(const std::exception_ptr& error) {
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace

void Event::record() {
  point_ = internal::make_event_point(RankContext::current().device);
  point_->record(nullptr);
}

void Event::wait() const {
  if (point_ != nullptr) rethrow(point_->wait());
}

void Event::synchronize() const {
  if (point_ != nullptr) rethrow(point_->synchronize());
}

bool Event::query() const { return point_ == nullptr || point_->has_passed(); }

double Event::elapsed_s(const Event& earlier) const {
  SB_CHECK(point_ != nullptr && earlier.point_ != nullptr && query() &&
               earlier.query(),
           "Event: time elapses between two events that were recorded and have "
           "passed; synchronize with both first");
  return point_->seconds_since(*earlier.point_);
}

}  // namespace shardbook
