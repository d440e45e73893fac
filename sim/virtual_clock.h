#pragma once

// One rank's virtual time.
//
// A device has queues (core/stream.h), and the host that feeds them runs ahead:
//
//   host     | issue a | issue b | issue c |
//   compute            | a ......... | b ... | c ...
//   comm                             | all_reduce (issued after a) ...
//
// The clock watches the rank's operations. Each one costs the host a launch,
// and begins on its queue when the host has issued it and the queue is free. A
// message is issued at the time that its queue has reached (it needs the
// results computed before), and a wait for it holds the waiting queue back
// until it has ended. No overlap is assumed anywhere: it is a result.
//
// Nothing here depends on wall time, so the same program gives the same times
// on any machine, however busy.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/context.h"
#include "sim/cost_model.h"
#include "sim/device_clock.h"
#include "sim/timeline.h"

namespace shardbook::sim {

/// Watches a rank: give it to RankContext::add_observer. A process that feeds
/// several devices (DataParallel) has one clock for all of them. Safe to call
/// from the rank's worker threads; the result does not depend on their order as
/// long as the program orders operations that depend on each other.
class VirtualClock : public Observer {
 public:
  /// The rank's device; its rank places it in the cluster.
  VirtualClock(const CostModel& model, int rank, const Device& device);

  /// Another device that this process feeds, at the place of `rank`.
  void add_device(const Device& device, int rank);

  void on_op_begin(const OpEvent& event) override;
  void on_allocation(const AllocationEvent& event) override;
  void on_event_record(int stream, EventTime& time) override;
  void on_event_wait(int stream, const EventTime& time) override;
  void on_event_synchronize(const EventTime& time) override;
  void on_host_read(const Device& device) override;

  /// Labels the operations that this thread's device is given from now on.
  void set_label(const std::string& label);

  /// The host issues a message from the current stream; returns when its data
  /// are ready.
  double issue_message();
  /// The current stream waits for a message from `begin_s` to `end_s`. Where
  /// the same cores compute and communicate, the operations computed meanwhile
  /// take that much longer.
  void wait_message(double begin_s, double end_s);
  /// Records a message, and the bytes that it sent over `link`.
  void add_message(TimelineEvent event, const std::string& link, Trust trust);
  /// The two parts, for a message whose end is not known when it is sent.
  void count_message(const std::string& link, double bytes, Trust trust);
  void add_event(TimelineEvent event);
  /// Without a timeline, events need no names.
  bool records_events() const { return devices_.front()->records_events(); }

  /// The first training step begins, on all ranks at time 0: earlier work does
  /// not count.
  void begin_steps();
  /// How often time has restarted: lines that were busy before are free.
  int epoch() const { return epoch_; }
  /// By how much time was advanced over work that repeats (see steady_state.h).
  double skipped_s() const { return skipped_s_; }
  int num_skips() const { return num_skips_; }
  void skip(const DeviceClock::State& from, const DeviceClock::State& to,
            std::int64_t times);
  /// A training step has ended, on all devices and for the host.
  void end_step();
  double now_s() const;
  /// Seconds of the last step; negative before the first.
  double last_step_s() const;

  const CostModel& model() const { return model_; }
  const std::vector<std::unique_ptr<DeviceClock>>& devices() const {
    return devices_;
  }
  DeviceClock& main() { return *devices_.front(); }
  /// The least trusted of all costs so far.
  Trust trust() const { return trust_; }

  /// The clock of this rank, or null where no virtual time is kept.
  static VirtualClock* current();

 private:
  DeviceClock* find(const Device& device);
  DeviceClock& issuer();
  void transfer(const OpEvent& event);
  void note(Trust trust);
  double latest() const;

  const CostModel& model_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<DeviceClock>> devices_;
  Trust trust_ = Trust::kCalibrated;
  int epoch_ = 0;
  double skipped_s_ = 0;
  int num_skips_ = 0;
};

/// Labels this rank's operations on the timeline for the lifetime of the scope:
/// "micro-batch 3". Does nothing where no virtual time is kept.
class ActivityScope {
 public:
  explicit ActivityScope(const std::string& label);
  ~ActivityScope();
  ActivityScope(const ActivityScope&) = delete;
  ActivityScope& operator=(const ActivityScope&) = delete;

 private:
  VirtualClock* clock_;
};

/// Keeps virtual time on this thread's rank for the lifetime of the scope.
class ClockScope {
 public:
  /// `model` must outlive it, and all work that it watches. With
  /// `records_events`, it keeps a timeline.
  ClockScope(const CostModel& model, int rank, bool records_events);
  ~ClockScope();
  ClockScope(const ClockScope&) = delete;
  ClockScope& operator=(const ClockScope&) = delete;
  VirtualClock& clock() { return *clock_; }

 private:
  const std::shared_ptr<VirtualClock> clock_;
};

}  // namespace shardbook::sim
