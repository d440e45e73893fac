#pragma once

// Streams: the queues of a device.
//
// Work of one stream runs in the order of its issue; different streams run side
// by side. An Event marks a point of one stream; another stream, or the host,
// may wait for it:
//
//   Event ready;
//   {
//     StreamScope scope(kCopyStream);
//     shard_on_device.copy_from(shard_on_host);    // beside what computes
//     ready.record();
//   }
//   ready.wait();                                  // what follows may use it
//
// On the CPU an operation is done when it returns, so every event has passed
// when it is recorded. Observers see streams and events: a clock of virtual
// time (sim/) makes the difference visible.

#include <memory>

#include "core/context.h"

namespace shardbook {

namespace internal {
class EventPoint;
}

/// The stream that operations run on unless told otherwise.
constexpr int kComputeStream = 0;
/// Parameters that are gathered or fetched ahead of their use.
constexpr int kUnshardStream = 1;
/// Gradients that are being sent.
constexpr int kReduceStream = 2;
/// Copies between host and device.
constexpr int kCopyStream = 3;

/// Operations and messages issued inside the scope go to `stream`.
class StreamScope : public ContextValue<int> {
 public:
  explicit StreamScope(int stream)
      : ContextValue(&RankContext::stream, stream) {}
};

/// A point of a stream. One that was never recorded has passed. A copy keeps
/// the point when the original is recorded again. How an event works depends on
/// the device that it is recorded on (core/internal/event_point.h).
class Event {
 public:
  /// Marks what the current stream has been given so far.
  void record();
  /// Work that the current stream is given from now on runs after the event.
  void wait() const;
  /// The host issues nothing more until the event has passed. Throws the error
  /// of the event's queue, if it had one before this point.
  void synchronize() const;
  /// Whether the event has passed; does not wait.
  bool query() const;
  /// Seconds of wall time from `earlier`, an event of the same device. Throws
  /// Error unless both were recorded and have passed.
  double elapsed_s(const Event& earlier) const;

 protected:
  std::shared_ptr<internal::EventPoint> point_;
};

}  // namespace shardbook
