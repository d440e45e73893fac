#pragma once

// Small timelines for tests.

#include "sim/timeline.h"

namespace shardbook::sim {

inline TimelineEvent event(const char* name, const char* category,
                           const char* queue, double begin_s, double end_s) {
  TimelineEvent event;
  event.name = name;
  event.category = category;
  event.queue = queue;
  event.begin_s = begin_s;
  event.end_s = end_s;
  return event;
}

inline MemorySample sample(double time_s, MemoryKind kind, std::int64_t bytes) {
  MemorySample sample;
  sample.time_s = time_s;
  sample.bytes[static_cast<std::size_t>(kind)] = bytes;
  return sample;
}

/// Two steps of one second: forward, backward with an all-reduce beside it,
/// optimizer. The second step begins at 1 s; `late_s` delays its all-reduce.
inline RankTimeline two_steps(int rank, double late_s = 0) {
  RankTimeline timeline;
  timeline.rank = rank;
  timeline.steps = {0, 1, 2};
  for (const double begin : {0.0, 1.0}) {
    timeline.events.push_back(
        event("matmul", "forward", "compute", begin, begin + 0.25));
    timeline.events.push_back(event("matmul_grad", "backward", "compute",
                                    begin + 0.25, begin + 0.75));
    timeline.events.push_back(event("all_reduce", "comm", "comm world",
                                    begin + 0.5 + (begin > 0 ? late_s : 0),
                                    begin + 0.875));
    timeline.events.back().label = "bucket 0";
    timeline.events.back().bytes = 1536;
    timeline.events.push_back(
        event("adam", "optimizer", "compute", begin + 0.875, begin + 1));
    timeline.memory.push_back(
        sample(begin, MemoryKind::kActivation, begin > 0 ? 200 : 100));
    timeline.memory.push_back(sample(begin + 0.75, MemoryKind::kGradient, 300));
  }
  return timeline;
}

/// Rank 0 sends one message to rank 1.
inline std::vector<RankTimeline> one_message() {
  std::vector<RankTimeline> ranks(2);
  ranks[1].rank = 1;
  TimelineEvent send = event("send", "comm", "comm world", 1e-3, 2e-3);
  send.bytes = 4096;
  send.peer = 1;
  send.message = 0;
  ranks[0].events.push_back(send);
  TimelineEvent recv = event("recv", "comm", "comm world", 0, 2e-3);
  recv.peer = 0;
  recv.message = 0;
  ranks[1].events.push_back(recv);
  return ranks;
}

}  // namespace shardbook::sim
