#pragma once

// A device that works on its own.
//
// A program hands work to a GPU and goes on; the GPU does the work in the order
// in which it was given. A `DeviceQueue` does the same for an emulated device:
// it is a thread with a list of work.
//
//   DeviceQueue gpu0(Device::cpu(0)), gpu1(Device::cpu(1));
//   gpu0.enqueue([&] { a = layer1(x); });        // returns at once
//   QueueEvent done;
//   done.record(gpu0);                           // what gpu0 was given so far
//   done.wait(gpu1);                             // gpu1 goes on after that
//   gpu1.enqueue([&] { b = layer2(a); });
//   gpu1.synchronize();                          // now the host may look at b
//
// Guaranteed: work of one queue runs one after another, in the order of its
// issue, on the queue's device and with the settings (gradients, phase,
// observers, random state) that the thread that gave it had at that moment.
// Only events order the work of two queues. A closure's captures are released
// before anything that waits for the closure goes on.
//
// Errors: when work throws, the rest of that queue, and of every queue that
// waits for it, is dropped; other queues go on. Events pass all the same,
// because a waiting queue must not wait forever, and the error is thrown where
// the host synchronises.
//
// A meta device computes nothing, so its work runs at once on the thread that
// gives it. A clock of virtual time still sees the same operations, events and
// overlap.
//
// One queue per device is the rule. A second one on the same device (for
// copies, with a stream of its own) is ordered by events alone.

#include <functional>
#include <memory>
#include <vector>

#include "core/context.h"
#include "core/stream.h"

namespace shardbook {

class DeviceQueue {
 public:
  using Work = std::function<void()>;

  /// `num_threads`: cores for one operation. `stream`: the stream that a clock
  /// sees, see core/stream.h.
  explicit DeviceQueue(const Device& device, int num_threads = 1,
                       int stream = kComputeStream);
  /// Finishes all work; errors not yet thrown are lost.
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  const Device& device() const;
  /// Appends `work` and returns at once.
  void enqueue(Work work);
  /// Returns when all work given has ended; throws the first error since the
  /// last call.
  void synchronize();

  class State;

 private:
  friend class QueueEvent;
  std::shared_ptr<State> state_;
};

/// Waits for all queues, then throws the first error of the first queue that
/// has one.
void synchronize(const std::vector<DeviceQueue*>& queues);

/// A point in the work of a queue. A wait refers to the last point recorded
/// before it.
class QueueEvent : public Event {
 public:
  /// Marks what `queue` has been given so far.
  void record(DeviceQueue& queue);
  /// Work that `queue` is given from now on runs after the event.
  void wait(DeviceQueue& queue) const;
};

}  // namespace shardbook
