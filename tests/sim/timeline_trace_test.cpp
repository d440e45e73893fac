#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "core/check.h"
#include "sim/chrome_trace.h"
#include "tests/sim/timeline_support.h"
#include "tests/support/chrome_trace.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"

namespace shardbook::sim {
namespace {

using Json = nlohmann::json;

std::vector<Json> trace(const std::vector<RankTimeline>& ranks) {
  const TempFolder folder;
  write_chrome_trace(folder / "trace", ranks);
  return Json::parse(read_bytes(folder / "trace"))["traceEvents"];
}

std::vector<Json> of_phase(const std::vector<Json>& events, const char* phase) {
  std::vector<Json> found;
  for (const Json& event : events) {
    if (event["ph"] == phase) found.push_back(event);
  }
  return found;
}

TEST(TimelineTrace, RanksAreProcessesAndQueuesThreads) {
  const std::vector<Json> events = trace({two_steps(0), two_steps(1)});
  std::vector<std::string> names;
  for (const Json& event : of_phase(events, "M")) {
    if (event["args"].contains("name")) {
      names.push_back(event["args"]["name"].get<std::string>());
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"rank 0", "steps", "compute",
                                             "comm world", "rank 1", "steps",
                                             "compute", "comm world"}));
}

TEST(TimelineTrace, TimesAreMicroseconds) {
  for (const Json& event : of_phase(trace({two_steps(3)}), "X")) {
    if (event["name"] != "all_reduce" || event["ts"] > 1e6) continue;
    EXPECT_EQ(event["pid"], 3);
    EXPECT_EQ(event["ts"], 500000.0);
    EXPECT_EQ(event["dur"], 375000.0);
    EXPECT_EQ(event["args"]["bytes"], 1536.0);
    EXPECT_EQ(event["args"]["label"], "bucket 0");
    return;
  }
  FAIL() << "no all_reduce in the first step";
}

/// What a reader finds in the file of these timelines.
ChromeTrace written(const std::vector<RankTimeline>& ranks) {
  const TempFolder folder;
  write_chrome_trace(folder / "trace", ranks);
  return expect_chrome_trace(folder / "trace", ranks);
}

RankTimeline with_events(const std::vector<TimelineEvent>& events, int rank) {
  RankTimeline timeline;
  timeline.rank = rank;
  timeline.steps = {0, 1};
  timeline.events = events;
  return timeline;
}

// The second message leaves before the first one arrives; the third arrives
// before the second, but is no part of it; the fourth finds the first lane
// empty.
TEST(TimelineTrace, MessagesInFlightAtOnceHaveLanesOfTheirOwn) {
  const char *comm = "comm", *world = "comm world";
  for (const int rank : {0, 1, 2, 3}) {
    const ChromeTrace trace = written({with_events(
        {event("a", comm, world, 0, 0.4), event("b", comm, world, 0.3, 0.9),
         event("c", comm, world, 0.5, 0.6), event("d", comm, world, 0.6, 0.8),
         event("matmul", "forward", "compute", 0, 0.7)},
        rank)});
    EXPECT_EQ(trace.lanes.at(rank),
              (std::vector<std::string>{"steps", "compute", "comm world",
                                        "comm world (2)"}));
    std::string second;
    for (const TraceSlice& slice : trace.slices) {
      if (slice.lane == "comm world (2)") second += slice.name;
    }
    EXPECT_EQ(second, "b");
  }
}

TEST(TimelineTrace, AnOperationWithinAnOperationStaysOnItsLane) {
  const ChromeTrace trace =
      written({with_events({event("attention", "forward", "compute", 0.1, 0.9),
                            event("matmul", "forward", "compute", 0.1, 0.5),
                            event("softmax", "forward", "compute", 0.5, 0.9)},
                           1)});
  EXPECT_EQ(trace.lanes.at(1), (std::vector<std::string>{"steps", "compute"}));
}

// Begins and durations that are rounded one by one add up to other ends.
TEST(TimelineTrace, EventsThatTouchAreOnOneLane) {
  std::mt19937 random(1);
  std::vector<TimelineEvent> events;
  double end_s = 3.0000005e-3;
  for (int i = 0; i < 600; ++i) {
    const double begin_s = end_s;
    end_s += 1e-9 * static_cast<double>(random() % 100000) / 13;
    events.push_back(event("add", "forward", "compute", begin_s, end_s));
  }
  RankTimeline rank = with_events(events, 1);
  rank.steps = {0, events[200].end_s, events[400].end_s, end_s};
  EXPECT_EQ(written({rank}).lanes.at(1),
            (std::vector<std::string>{"steps", "compute"}));
}

TEST(TimelineTrace, NoEventIsLostWhateverCrosses) {
  std::mt19937 random(2);
  std::vector<RankTimeline> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<TimelineEvent> events;
    for (int i = 0; i < 200; ++i) {
      const double begin_s = 1e-9 * static_cast<double>(random() % 2500);
      const double length_s = 1e-9 * static_cast<double>(random() % 90);
      const bool is_message = random() % 2 == 0;
      events.push_back(event("e", is_message ? "comm" : "forward",
                             is_message ? "comm pp" : "compute", begin_s,
                             begin_s + length_s));
    }
    ranks.push_back(with_events(events, rank));
  }
  written(ranks);
}

TEST(TimelineTrace, MemoryIsACounterOfEveryKind) {
  const std::vector<Json> counters = of_phase(trace({two_steps(0)}), "C");
  ASSERT_EQ(counters.size(), 4u);
  EXPECT_EQ(counters[0]["args"]["activation"], 100);
  EXPECT_EQ(counters[0]["args"].size(), std::size_t{kNumMemoryKinds});
}

TEST(TimelineTrace, AnArrowJoinsSendAndRecv) {
  const std::vector<Json> events = trace(one_message());
  const std::vector<Json> starts = of_phase(events, "s");
  const std::vector<Json> ends = of_phase(events, "f");
  ASSERT_EQ(starts.size(), 1u);
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(starts[0]["id"], ends[0]["id"]);
  EXPECT_EQ(starts[0]["name"], ends[0]["name"]);
  EXPECT_EQ(starts[0]["cat"], ends[0]["cat"]);
  EXPECT_EQ(starts[0]["pid"], 0);
  EXPECT_EQ(ends[0]["pid"], 1);
  EXPECT_EQ(ends[0]["bp"], "e");
  EXPECT_LE(starts[0]["ts"], ends[0]["ts"]);
}

TEST(TimelineTrace, MessagesThatCrossAreTwoArrows) {
  std::vector<RankTimeline> ranks = one_message();
  // Rank 1's first message to rank 0 has the same number.
  TimelineEvent send = ranks[0].events[0];
  send.peer = 0;
  TimelineEvent recv = ranks[1].events[0];
  recv.peer = 1;
  ranks[1].events.push_back(send);
  ranks[0].events.push_back(recv);
  const std::vector<Json> starts = of_phase(trace(ranks), "s");
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_NE(starts[0]["id"], starts[1]["id"]);
}

TEST(TimelineTrace, AnArrowNeedsBothEnds) {
  std::vector<RankTimeline> ranks = one_message();
  ranks.pop_back();
  EXPECT_TRUE(of_phase(trace(ranks), "s").empty());
}

TEST(TimelineTrace, StepsThatAreLeftOutAreNumbered) {
  RankTimeline rank = two_steps(0);
  rank.steps = {0, 1, 2, 8, 9};
  rank.first_left_out = 2;
  rank.num_left_out = 6;
  std::vector<std::string> names;
  for (const Json& each : trace({rank})) {
    const std::string name = each["name"];
    if (each["ph"] == "X" && name.rfind("step", 0) == 0) names.push_back(name);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"step 1", "step 2",
                                      "steps 3 to 8, left out", "step 9"}));
}

// Their events are collected as text.
TEST(TimelineTrace, RanksThatAreProcessesWriteTheSameFile) {
  const std::vector<RankTimeline> ranks = {two_steps(0), two_steps(1)};
  const TempFolder folder;
  write_chrome_trace(folder / "one", ranks);
  write_chrome_trace(folder / "many",
                     {chrome_events(ranks[0]), chrome_events(ranks[1])});
  EXPECT_EQ(read_bytes(folder / "many"), read_bytes(folder / "one"));
}

TEST(TimelineTrace, AFileThatCannotBeWrittenIsNamed) {
  const std::string error = error_of(
      [&] { write_chrome_trace("/no/such/folder/trace.json", one_message()); });
  EXPECT_EQ(error,
            "/no/such/folder/trace.json: the trace cannot be written: No "
            "such file or directory");
}

}  // namespace
}  // namespace shardbook::sim
