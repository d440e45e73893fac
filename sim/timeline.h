#pragma once

// What the ranks did in virtual time.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/device.h"

namespace shardbook::sim {

/// One operation, message or wait on one queue of a rank.
struct TimelineEvent {
  std::string name;      ///< "matmul", "all_reduce"
  std::string label;     ///< what it is for: "bucket 2"; may be empty
  std::string category;  ///< "forward", "backward", "optimizer", "comm", "copy"
  std::string queue;     ///< "compute", "unshard", "comm world", "host"
  double begin_s = 0;
  double end_s = 0;
  double flops = 0;
  double bytes = 0;  ///< memory traffic, or bytes that this rank sends
  /// send and recv: the other rank (world) and a number that both ends share,
  /// unique among the messages from one rank to the other. Otherwise -1.
  int peer = -1;
  std::int64_t message = -1;
};

/// Bytes in use by kind from `time_s` on.
struct MemorySample {
  double time_s = 0;
  std::array<std::int64_t, kNumMemoryKinds> bytes{};
};

/// What travelled over one kind of link, sent by this rank.
struct LinkBytes {
  std::string link;  ///< "nvlink", "network", "pcie"
  double bytes = 0;
};

/// One rank's run. Events are in the order of their issue; per queue they do
/// not overlap.
struct RankTimeline {
  int rank = 0;
  std::vector<TimelineEvent> events;
  std::vector<MemorySample> memory;
  /// Ends of the training steps; the first entry is the begin of the first.
  std::vector<double> steps;
};

/// Figures of one rank's last step: the first ones may do more than the others
/// (buckets are rebuilt, prefetching learns its order).
struct TimeSummary {
  double step_s = 0;
  /// Share of the step in which the compute queue does nothing.
  double idle_share = 0;
  /// Time in which the compute queue waits for a message.
  double exposed_comm_s = 0;
  std::vector<LinkBytes> links;
};

}  // namespace shardbook::sim
