#pragma once

// Timelines in the format of Chrome's trace viewer, which Perfetto
// (ui.perfetto.dev) opens: a process per rank, a thread per queue and one for
// the steps, memory by kind as counters, and an arrow for each message. Events
// of one thread must follow one another or nest. A queue with messages in
// flight at the same time, or with other events that cross, therefore has
// several threads: "comm world", "comm world (2)".
//
// Format: "Trace Event Format", Google, 2016; the JSON object form.

#include <string>
#include <vector>

#include "sim/timeline.h"

namespace shardbook::sim {

/// Writes one event per line; times are microseconds, rounded to nanoseconds. A
/// send and a recv are joined by an arrow where both ends are among the
/// timelines. Throws Error, which names the file, when it cannot be written.
void write_chrome_trace(const std::string& path,
                        const std::vector<RankTimeline>& timelines);

/// The events of one rank, without arrows, for ranks that are processes: one of
/// them collects the texts and writes the file.
std::string chrome_events(const RankTimeline& timeline);
void write_chrome_trace(const std::string& path,
                        const std::vector<std::string>& events_by_rank);

}  // namespace shardbook::sim
