#pragma once

// What an Event has recorded. Read by core/*.cpp only.

#include <exception>
#include <memory>

#include "core/context.h"
#include "core/device.h"

namespace shardbook::internal {

/// A point of a stream. Each type of device has its own kind: on the CPU a flag
/// that the stream's thread sets when it gets there, on CUDA a cudaEvent_t that
/// is recorded and waited for on the device. Several threads may share a point.
class EventPoint {
 public:
  virtual ~EventPoint() = default;

  /// Marks what the current stream has been given so far. `error` is the
  /// stream's error before this point, or null. Call once.
  void record(std::exception_ptr error);
  /// Work that the current stream is given from now on runs after the point.
  /// Returns the point's error.
  std::exception_ptr wait() const;
  /// The calling thread goes on after the point. Returns the point's error.
  std::exception_ptr synchronize() const;
  virtual bool has_passed() const = 0;
  /// Seconds from an earlier point of the same kind; both have passed.
  virtual double seconds_since(const EventPoint& earlier) const = 0;

 private:
  virtual void mark(std::exception_ptr error) = 0;
  virtual std::exception_ptr hold_stream() const = 0;
  virtual std::exception_ptr hold_host() const = 0;

  EventTime time_;  ///< for observers that keep a clock
};

/// A point of `device`, not yet recorded.
std::shared_ptr<EventPoint> make_event_point(const Device& device);

}  // namespace shardbook::internal
