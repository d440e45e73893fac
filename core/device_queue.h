#pragma once

// A device that works on its own.
//
// A GPU is handed work and told nothing more: the program goes on, and the
// device does what it was given, in that order. A `DeviceQueue` is that for an
// emulated device: a thread with a list of what is to be done.
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
// observers, random state) of the thread that gave it, as they were then.
// Between two queues nothing is ordered but what events order. What a closure
// holds is released before whatever waits for it goes on.
//
// Errors: when work throws, the rest of that queue, and of every queue that
// waits for it, is dropped; other queues go on. Events pass all the same, so
// that nobody waits for ever, and the error is thrown where the host
// synchronises.
//
// A meta device computes nothing, so that nothing is gained by waiting: work
// runs at once on the thread that gives it. A clock of virtual time sees the
// same operations and the same events, and the overlap that they leave.
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

  /// `num_threads`: cores for one operation. `stream`: what a clock takes the
  /// queue for, see core/stream.h.
  explicit DeviceQueue(const Device& device, int num_threads = 1,
                       int stream = kComputeStream);
  /// Does what it was given first; errors that nobody asked for are lost.
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  const Device& device() const;
  /// Appends `work` and returns at once.
  void enqueue(Work work);
  /// Returns when all that was given has ended; throws the first error since
  /// the last call.
  void synchronize();

  class State;

 private:
  friend class QueueEvent;
  std::shared_ptr<State> state_;
};

/// Waits for all of them, then throws the first error of the first queue that
/// has one.
void synchronize(const std::vector<DeviceQueue*>& queues);

/// A point in the work of a queue. One that was never recorded has passed. A
/// queue or the host that waits, waits for the last point recorded before.
class QueueEvent {
 public:
  /// Marks what `queue` has been given so far.
  void record(DeviceQueue& queue);
  /// What `queue` is given from now on runs after the event.
  void wait(DeviceQueue& queue) const;
  /// The host waits. Throws what kept the event's queue from getting there.
  void synchronize() const;

  class Point;

 private:
  std::shared_ptr<Point> point_;
};

}  // namespace shardbook
