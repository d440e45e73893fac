#pragma once

// The last step of a run as compact JSON: "virtual.timeline" in a chapter's
// output under --format json, which report.html draws.
//
//   {"world_size": 4, "step_s": 0.0013, "num_steps": 1,
//    "ops": [["matmul", "", "forward"], ["all_reduce", "bucket 0", "comm"]],
//    "kinds": ["parameter", "gradient"],
//    "groups": [{
//      "ranks": [[0, 3]],                            first and last of a run
//      "queues": [{"name": "compute",
//                  "events": [[0, 0, 41000, 1024, 65536], ...]}],
//      "memory": [[0, 4096, 0], [41000, 4096, 1024], ...]}]}
//
// An event is [op, begin, end, bytes, flops, peer, message], where op is an
// index into "ops" and zeros at the end (peer and message: -1) are left out. A
// sample is a time and the bytes of each kind. Times are whole nanoseconds
// since the begin of the step.

#include <string>
#include <vector>

#include "sim/timeline_step.h"

namespace shardbook::sim {

/// At most 8 groups of ranks that differ. In a queue with more than 2000
/// events, those of one category and label are joined ("12 operations") within
/// a 1000th of the step, and keep the sum of their times. Of more than
/// 1000 samples of memory, each 1000th of the step keeps its fullest and its
/// last.
std::string timeline_json(const std::vector<RankTimeline>& timelines);

/// Reads it back, rounded to nanoseconds. `source` names the text in messages.
/// Throws Error that names source, path and value when something is missing,
/// of the wrong type or out of its range.
StepView read_timeline_json(const std::string& text, const std::string& source);

}  // namespace shardbook::sim
