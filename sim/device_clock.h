#pragma once

// The virtual time of one device. sim/virtual_clock.h explains how it passes.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/context.h"
#include "sim/cost_model.h"
#include "sim/timeline.h"

namespace shardbook::sim {

/// The queues of one device and of the thread that feeds it.
class DeviceClock {
 public:
  // A long run keeps its first steps and its last: kLastSteps to kMostSteps,
  // with about kLastEvents events (steps are left out at twice these limits).
  // Stages that do not flush may be many steps apart, and a picture shows them
  // at one time.
  static constexpr std::size_t kFirstSteps = 2;
  static constexpr std::size_t kLastSteps = 12, kMostSteps = 256;
  static constexpr std::size_t kLastEvents = 16384;

  /// The sums of one step so far.
  struct StepSums {
    double busy_s = 0;
    double forward_s = 0;  ///< the part of busy_s that forwards take
    double exposed_s = 0;
    double bubble_s = 0;
    std::vector<LinkBytes> links;
  };

  DeviceClock(const CostModel& model, int rank, Device device);

  /// When the next work on `stream` could begin.
  double ready(int stream) const;
  double& queue(int stream);
  double& host() { return host_; }
  /// When all issued work has ended.
  double now() const;

  /// Puts work of `seconds` on a queue, not before `earliest_s`.
  void run(const OpEvent& event, double seconds, double earliest_s = 0);
  /// Holds a queue back for a message that is sent at `sent_s` and arrives at
  /// `until_s`.
  void wait_message(int stream, double sent_s, double until_s);
  /// Holds a queue back for work on another queue of this device.
  void wait_event(int stream, double until_s);
  /// Notes a copy to or from this device: a wait for it counts as a wait for a
  /// message, and is a bubble between `from_s` and `begin_s`.
  void note_copy(double from_s, double begin_s, double end_s);
  /// Labels the operations to come: "micro-batch 3".
  void set_label(std::string label) { label_ = std::move(label); }
  void add(TimelineEvent event);
  void count_link(const std::string& link, double bytes);
  void on_memory(MemoryKind kind, std::int64_t bytes);
  /// Steps begin, at time 0.
  void begin_steps();
  void end_step(double at_s);
  /// Factor of the next operation: faults and jitter.
  double slowdown();
  /// State that advances evenly when work repeats: times of queues and host,
  /// and the sums of this step. Adding the difference of two states `times`
  /// times is equivalent to running the work between them that often.
  struct State {
    std::vector<double> times;
    StepSums sums;
  };
  State state() const;
  void advance(const State& from, const State& to, std::int64_t times);

  int rank() const { return rank_; }
  const Device& device() const { return device_; }
  const RankTimeline& timeline() const { return timeline_; }
  TimeSummary summary() const;
  /// Names the world, and the ranks that this one stands for.
  void set_place(int world_size, std::vector<int> alike);
  /// Keep events and memory samples (the default), or times only.
  void set_records_events(bool on) { records_events_ = on; }
  bool records_events() const { return records_events_; }

 private:
  /// A message, as the queues that wait for it see it: missing until `sent_s`,
  /// then on the wire.
  struct Passage {
    double from_s, sent_s, until_s;
  };
  void hold(int stream, double begin_s, double end_s, const char* category);
  void leave_out_steps();

  const CostModel& model_;
  int rank_;
  Device device_;
  std::vector<double> queues_;
  /// Messages that queues other than `compute` wait for; `compute` may wait for
  /// those queues.
  std::vector<Passage> passages_;
  std::string label_;
  double host_ = 0;
  bool records_events_ = true;
  std::uint64_t num_ops_ = 0;
  RankTimeline timeline_;
  std::vector<StepSums> steps_;  ///< by entry of timeline_.steps, its begin
  /// The events and memory samples before each of these entries.
  struct Counts {
    std::size_t events = 0, samples = 0;
  };
  std::vector<Counts> before_;
  std::array<std::int64_t, kNumMemoryKinds> bytes_{};
};

}  // namespace shardbook::sim
