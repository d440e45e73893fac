#pragma once

// A Chrome trace as Perfetto up to 56 reads it: slices of one thread nest, and
// one that crosses another is lost.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "sim/timeline.h"

namespace shardbook {

/// A complete event ("X") in whole nanoseconds.
struct TraceSlice {
  int rank = 0;
  std::string lane;  ///< name of its thread
  std::string name;
  std::int64_t begin_ns = 0, end_ns = 0;
};

struct ChromeTrace {
  std::vector<TraceSlice> slices;
  /// Names of the threads of each rank, from the top.
  std::map<int, std::vector<std::string>> lanes;
  std::string faults;  ///< one per line; "" if nothing is lost or unnamed
};

namespace chrome_trace {

using Json = nlohmann::json;

// Releases round a thousand times the number, or cut it off; -1 if they differ.
inline std::int64_t nanoseconds(const Json& microseconds) {
  if (microseconds.is_number_integer()) {
    return 1000 * microseconds.get<std::int64_t>();
  }
  const double product = microseconds.get<double>() * 1000.0;
  const std::int64_t rounded = std::llround(product);
  return rounded == static_cast<std::int64_t>(product) ? rounded : -1;
}

// Process and thread; a thread 0 is the one with the process' number.
inline std::pair<int, int> thread_of(const Json& event) {
  const int pid = event.at("pid"), tid = event.at("tid");
  return {pid, tid == 0 ? pid : tid};
}

inline std::string text(const TraceSlice& slice) {
  return slice.name + " " + std::to_string(slice.begin_ns) + " to " +
         std::to_string(slice.end_ns);
}

// The slices of one thread, in the order of the file: those that cross.
inline std::string crossings(std::vector<TraceSlice> slices) {
  std::stable_sort(slices.begin(), slices.end(),
                   [](const TraceSlice& a, const TraceSlice& b) {
                     return a.begin_ns < b.begin_ns;
                   });
  std::string faults;
  std::vector<TraceSlice> open;
  for (const TraceSlice& slice : slices) {
    while (!open.empty() && open.back().end_ns <= slice.begin_ns) {
      open.pop_back();
    }
    if (!open.empty() && slice.end_ns > open.back().end_ns) {
      faults += "rank " + std::to_string(slice.rank) + ", " + slice.lane +
                ": " + text(slice) + " crosses " + text(open.back()) + "\n";
    } else {
      open.push_back(slice);
    }
  }
  return faults;
}

}  // namespace chrome_trace

inline ChromeTrace read_chrome_trace(const std::string& path) {
  using namespace chrome_trace;
  std::ifstream file(path);
  const Json events = Json::parse(file).at("traceEvents");
  ChromeTrace trace;
  std::map<std::pair<int, int>, std::string> names;
  std::map<int, std::map<int, std::string>> sorted;
  for (const Json& event : events) {
    if (event.at("ph") != "M") continue;
    if (event.at("name") == "thread_name") {
      names[thread_of(event)] = event.at("args").at("name");
    } else if (event.at("name") == "thread_sort_index") {
      const int place = event.at("args").at("sort_index");
      sorted[event.at("pid")][place] = names[thread_of(event)];
    }
  }
  for (const auto& [rank, lanes] : sorted) {
    std::set<std::string> different;
    for (const auto& [place, name] : lanes) {
      trace.lanes[rank].push_back(name);
      if (!different.insert(name).second) {
        trace.faults += "two lanes are called '" + name + "'\n";
      }
    }
  }
  std::map<std::pair<int, int>, std::vector<TraceSlice>> threads;
  for (const Json& event : events) {
    if (event.at("ph") != "X") continue;
    const auto thread = thread_of(event);
    const std::int64_t begin = nanoseconds(event.at("ts"));
    const std::int64_t length = nanoseconds(event.at("dur"));
    if (begin < 0 || length < 0) {
      trace.faults += "no whole nanoseconds: " + event.dump() + "\n";
    }
    trace.slices.push_back(
        {thread.first, names[thread], event.at("name"), begin, begin + length});
    threads[thread].push_back(trace.slices.back());
  }
  for (const auto& [thread, slices] : threads) {
    if (names[thread].empty()) {
      trace.faults += "thread " + std::to_string(thread.second) + " of rank " +
                      std::to_string(thread.first) + " has no name\n";
    }
    trace.faults += crossings(slices);
  }
  return trace;
}

/// The file has all steps and events of the timelines, rounded to nanoseconds,
/// each on a lane of its queue, and none is lost. Returns what was read.
inline ChromeTrace expect_chrome_trace(
    const std::string& path, const std::vector<sim::RankTimeline>& timelines) {
  using Event =
      std::tuple<int, std::string, std::string, std::int64_t, std::int64_t>;
  const auto ns = [](double seconds) {
    return static_cast<std::int64_t>(std::llround(seconds * 1e9));
  };
  const ChromeTrace trace = read_chrome_trace(path);
  EXPECT_EQ(trace.faults, "");
  std::vector<Event> written, expected;
  std::size_t num_steps = 0, num_expected_steps = 0;
  for (const TraceSlice& slice : trace.slices) {
    if (slice.lane == "steps") {
      ++num_steps;
      continue;
    }
    // "comm world (2)" is a lane of "comm world"
    const std::string queue = slice.lane.substr(0, slice.lane.find(" ("));
    written.emplace_back(slice.rank, queue, slice.name, slice.begin_ns,
                         slice.end_ns);
  }
  for (const sim::RankTimeline& rank : timelines) {
    if (!rank.steps.empty()) num_expected_steps += rank.steps.size() - 1;
    for (const sim::TimelineEvent& event : rank.events) {
      const std::string queue = event.queue.substr(0, event.queue.find(" ("));
      expected.emplace_back(rank.rank, queue, event.name, ns(event.begin_s),
                            ns(event.end_s));
    }
  }
  EXPECT_EQ(num_steps, num_expected_steps);
  std::sort(written.begin(), written.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_TRUE(written == expected)
      << written.size() << " slices of " << expected.size() << " events";
  return trace;
}

}  // namespace shardbook
