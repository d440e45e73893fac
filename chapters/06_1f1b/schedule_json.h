#pragma once

// Schedules as files.
//
//   {"name": "mine", "micro_batches": 2,
//    "ranks": ["F0 F1 B0 B1",
//              "F0 B0 F1 B1"]}
//
// One string per rank, its actions in order: a letter of schedule.h and the
// micro-batch, and a chunk when it is not chunk 0 ("F3.1"); "F5&B2" is a pair
// that overlaps. Stage s is on rank s, unless there are
//
//   "routes": [["0", "1", "0.1", "1.1"]]   places of the stages of each route
//   "route_of": [0, 0]                     the route of each micro-batch
//
// The weights have one version, unless there are updates ("U3": with the
// gradients up to micro-batch 3; "U": with all gradients so far) and
//
//   "versions": "newest"                   or "first-stage", "delay-one"
//   "micro_batches_per_step": 1
//
// Keys that begin with an underscore are remarks.

#include <string>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Reads and checks a schedule. Throws an Error that begins with `label` (the
/// file), names the key or the broken rule, and lists the allowed values. At
/// most 1024 ranks, 65536 micro-batches, and 2^20 places times micro-batches.
Schedule schedule_from_json(const std::string& text, const std::string& label);
/// The same from a file. Throws Error if the file cannot be read.
Schedule read_schedule(const std::string& file);

/// The text from which schedule_from_json reads the same schedule.
std::string to_json(const Schedule& schedule);

}  // namespace shardbook::pipeline
