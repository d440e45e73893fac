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

#include "core/context.h"

namespace shardbook {

/// The stream that operations run on unless told otherwise.
constexpr int kComputeStream = 0;
/// Parameters that are gathered or fetched ahead of their use.
constexpr int kUnshardStream = 1;
/// Gradients on their way out.
constexpr int kReduceStream = 2;
/// Copies between host and device.
constexpr int kCopyStream = 3;

/// Operations and messages issued inside the scope go to `stream`.
class StreamScope : public ContextValue<int> {
 public:
  explicit StreamScope(int stream)
      : ContextValue(&RankContext::stream, stream) {}
};

/// A point of a stream. One that was never recorded has passed.
class Event {
 public:
  /// Marks what the current stream has been given so far.
  void record() {
    RankContext& context = RankContext::current();
    for (Observer* observer : context.observers()) {
      observer->on_event_record(context.stream, time_s_);
    }
  }
  /// Work that the current stream is given from now on runs after the event.
  void wait() const {
    RankContext& context = RankContext::current();
    for (Observer* observer : context.observers()) {
      observer->on_event_wait(context.stream, time_s_);
    }
  }
  /// The host issues nothing more until the event has passed.
  void synchronize() const {
    for (Observer* observer : RankContext::current().observers()) {
      observer->on_event_synchronize(time_s_);
    }
  }

 private:
  double time_s_ = 0;
};

}  // namespace shardbook
