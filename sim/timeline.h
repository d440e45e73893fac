#pragma once

// The ranks' work in virtual time, as events.

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "core/device.h"

namespace shardbook::sim {

/// One operation, message or wait on one queue of a rank.
struct TimelineEvent {
  std::string name;   ///< "matmul", "all_reduce"
  std::string label;  ///< its purpose: "bucket 2"; may be empty
  /// Work: "forward", "backward", "optimizer", "comm", "copy", "host".
  /// A queue that is held back: "bubble", "exposed", "wait" (see TimeSummary).
  std::string category;
  std::string queue;  ///< "compute", "unshard", "comm world", "host"
  double begin_s = 0;
  double end_s = 0;
  double flops = 0;
  double bytes = 0;  ///< memory traffic, or bytes that this rank sends
  /// send and recv: the other rank (world) and a number that both ends share,
  /// unique among the messages from one rank to the other. Otherwise -1.
  int peer = -1;
  std::int64_t message = -1;
};

/// Bytes in use by kind from `time_s` on. Two samples may have one time: a
/// moment's peak, and the use after it.
struct MemorySample {
  double time_s = 0;
  std::array<std::int64_t, kNumMemoryKinds> bytes{};

  std::int64_t total() const {
    return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  }
};

/// The bytes that this rank sent over one kind of link.
struct LinkBytes {
  std::string link;  ///< "nvlink", "network", "pcie"
  double bytes = 0;
};

/// Whether a queue works during an event, or is held back.
bool is_work(const TimelineEvent& event);

/// One rank's run: all of it, or of a long run the first steps and the last.
/// Events are in the order of their issue. Those of one queue do not overlap,
/// except for messages to and from several ranks.
struct RankTimeline {
  int rank = 0;
  /// Ranks that were not run because they do the same; all ranks of the world
  /// (0: those that have a timeline).
  std::vector<int> alike = {};
  int world_size = 0;
  std::vector<TimelineEvent> events;
  std::vector<MemorySample> memory;
  /// Ends of the training steps; the first entry is the begin of the first.
  std::vector<double> steps;
  /// Nothing else is kept of the steps from steps[first_left_out] to
  /// steps[first_left_out + 1].
  std::size_t first_left_out = 0;
  std::int64_t num_left_out = 0;
};

/// Figures of one rank's last step: the first ones may do more than the others
/// (buckets are rebuilt, prefetching learns its order). If ranks do not flush,
/// it is the last step that begins a forward.
///
/// At every instant of the step the compute queue is in one of four states:
///
///   busy     an operation runs on it
///   exposed  it waits for a message that is on the wire
///   bubble   it waits for a message that has not been sent: the sender is
///            still computing, or waits itself
///   rest     the host has given it nothing, or it waits for another queue
///
/// The idle share is all that is not busy: exposed, bubble and rest.
struct TimeSummary {
  double step_s = 0;
  double idle_share = 0;
  double exposed_comm_s = 0;
  double bubble_s = 0;
  std::vector<LinkBytes> links;
};

}  // namespace shardbook::sim
