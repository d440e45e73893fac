#include "sim/timeline_json.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/sim/timeline_support.h"
#include "tests/support/errors.h"

namespace shardbook::sim {
namespace {

void expect_equal(const StepView& a, const StepView& b) {
  EXPECT_EQ(a.world_size, b.world_size);
  EXPECT_EQ(a.step_s, b.step_s);
  ASSERT_EQ(a.groups.size(), b.groups.size());
  for (std::size_t g = 0; g < a.groups.size(); ++g) {
    EXPECT_EQ(a.groups[g].ranks, b.groups[g].ranks);
    const RankTimeline& x = a.groups[g].timeline;
    const RankTimeline& y = b.groups[g].timeline;
    ASSERT_EQ(x.events.size(), y.events.size());
    ASSERT_EQ(x.memory.size(), y.memory.size());
    for (std::size_t i = 0; i < x.memory.size(); ++i) {
      EXPECT_NEAR(x.memory[i].time_s, y.memory[i].time_s, 1e-9);
      EXPECT_EQ(x.memory[i].bytes, y.memory[i].bytes);
    }
  }
}

StepView read_back(const std::vector<RankTimeline>& ranks) {
  return read_timeline_json(timeline_json(ranks), "test");
}

// One after the other through a step of one second.
RankTimeline many_events(int count) {
  RankTimeline rank;
  rank.steps = {0, 1};
  for (int i = 0; i < count; ++i) {
    rank.events.push_back(
        event("add", "forward", "compute", 1.0 * i / count, (i + 1.0) / count));
    rank.events.back().bytes = 8;
  }
  return rank;
}

TEST(TimelineJson, WhatIsWrittenIsReadBack) {
  const std::vector<RankTimeline> ranks = {two_steps(0), two_steps(1),
                                           two_steps(2, 0.125)};
  const StepView read = read_back(ranks);
  expect_equal(last_step(ranks), read);
  // Events come back by queue: three of compute, then the all-reduce.
  const TimelineEvent& comm = read.groups[1].timeline.events[3];
  EXPECT_EQ(comm.name, "all_reduce");
  EXPECT_EQ(comm.label, "bucket 0");
  EXPECT_EQ(comm.category, "comm");
  EXPECT_EQ(comm.queue, "comm world");
  EXPECT_NEAR(comm.begin_s, 0.625, 1e-9);
  EXPECT_NEAR(comm.end_s, 0.875, 1e-9);
  EXPECT_EQ(comm.bytes, 1536);
}

TEST(TimelineJson, MessagesKeepTheirEnds) {
  const StepView read = read_back(one_message());
  ASSERT_EQ(read.groups.size(), 2u);
  EXPECT_EQ(read.groups[0].timeline.events[0].peer, 1);
  EXPECT_EQ(read.groups[0].timeline.events[0].message, 0);
  EXPECT_EQ(read.groups[1].timeline.events[0].peer, 0);
}

TEST(TimelineJson, AtMostSoManyGroups) {
  std::vector<RankTimeline> ranks;
  for (int r = 0; r < 12; ++r) ranks.push_back(two_steps(r, 0.01 * r));
  const StepView read = read_back(ranks);
  EXPECT_EQ(read.world_size, 12);
  EXPECT_EQ(read.groups.size(), 8u);
}

TEST(TimelineJson, AlikeRanksCostNothing) {
  std::vector<RankTimeline> ranks;
  for (int r = 0; r < 1000; ++r) ranks.push_back(two_steps(r));
  EXPECT_LT(timeline_json(ranks).size(), 700u);
}

TEST(TimelineJson, LongQueuesAreJoined) {
  constexpr int kEvents = 100'000;
  const StepView read = read_back({many_events(kEvents)});
  const auto& events = read.groups[0].timeline.events;
  EXPECT_LE(events.size(), 2001u);
  EXPECT_GE(events.size(), 800u);
  double bytes = 0;
  for (const TimelineEvent& event : events) bytes += event.bytes;
  EXPECT_EQ(bytes, 8.0 * kEvents);
  EXPECT_EQ(events[1].name, "100 operations");
}

TEST(TimelineJson, WhatIsForAnotherMicroBatchIsNotJoined) {
  RankTimeline rank = many_events(10'000);
  for (std::size_t i = 0; i < rank.events.size(); ++i) {
    rank.events[i].label = i % 4 < 2 ? "micro-batch 0" : "micro-batch 1";
  }
  const StepView read = read_back({rank});
  const auto& events = read.groups[0].timeline.events;
  EXPECT_LE(events.size(), 2002u);
  std::map<std::string, double> seconds;
  for (std::size_t i = 0; i < events.size(); ++i) {
    seconds[events[i].label] += events[i].end_s - events[i].begin_s;
    if (i == 0) continue;
    EXPECT_GE(events[i].begin_s, events[i - 1].end_s - 2e-9) << i;
  }
  EXPECT_NEAR(seconds["micro-batch 0"], 0.5, 1e-5);
  EXPECT_NEAR(seconds["micro-batch 1"], 0.5, 1e-5);
}

TEST(TimelineJson, ManySamplesOfMemoryKeepThePeakAndWhatStays) {
  RankTimeline rank;
  rank.steps = {0, 1};
  constexpr int kSamples = 10'000;
  for (int i = 0; i < kSamples; ++i) {
    rank.memory.push_back(sample(1.0 * i / kSamples, MemoryKind::kActivation,
                                 i == 5004 ? 1000 : i % 10));
  }
  rank.events = {event("add", "forward", "compute", 0, 1)};
  const StepView read = read_back({rank});
  const auto& memory = read.groups[0].timeline.memory;
  EXPECT_LE(memory.size(), 2002u);
  std::int64_t most = 0;
  for (const MemorySample& each : memory) most = std::max(most, each.total());
  EXPECT_EQ(most, 1000);
  EXPECT_EQ(memory.back().total(), 9);
}

std::string with_groups(const std::string& groups) {
  return R"({"world_size": 1, "step_s": 1, "ops": [["a", "", "comm"]],
             "kinds": ["parameter"], "groups": )" +
         groups + "}";
}

std::string with_events(const std::string& events) {
  return with_groups(R"([{"ranks": [[0, 0]], "memory": [],
                          "queues": [{"name": "q", "events": )" +
                     events + "}]}]");
}

TEST(TimelineJson, MistakesAreSentences) {
  const std::string group =
      R"({"ranks": [[0, 0]], "queues": [], "memory": []})";
  const std::string event = ".groups[0].queues[0].events[0]";
  const std::string whole = "; it has to be a whole number from ";
  const std::map<std::string, std::string> messages = {
      {"{", ": no JSON: the first mistake is at byte 2"},
      {"[1e999]", ": no JSON that can be read: a number is too large"},
      {"{\"world_size\": " + std::string(100, '[') + std::string(100, ']') +
           "}",
       ": lists and objects are nested more than 64 deep; give at most 64 "
       "levels"},
      {"{}", ".world_size is missing"},
      {"[]", " is []; it has to be an object"},
      {with_groups("7"), ".groups is 7; it has to be a list"},
      {with_groups("[{\"ranks\": [[0, 7]]}]"),
       ".groups[0].ranks[0][1] is 7" + whole + "0 to 0"},
      {with_groups("[" + group + "," + group + "]"),
       ".groups name 2 ranks of a world of 1"},
      {with_events("[[1, 0, 5]]"), event + "[0] is 1" + whole + "0 to 0"},
      {with_events("[[0, 5, 4]]"),
       event + "[2] is 4" + whole + "5 to 4611686018427387904"},
      {with_events("[[0, 5]]"), event + " has 2 elements; it needs 3"},
      {with_events("[[0, 1, 2, \"many\"]]"),
       event + "[3] is \"many\"; it has to be a number from 0 up"},
      {R"({"world_size": 1, "step_s": 1, "ops": [], "kinds": ["heap"],
           "groups": []})",
       ".kinds[0] is \"heap\"; there is no such kind of memory"}};
  for (const auto& [text, message] : messages) {
    EXPECT_EQ(error_of([&, &text = text] {
                read_timeline_json(text, "run.json: timeline");
              }),
              "run.json: timeline" + message);
  }
  read_timeline_json(with_events("[[0, 1, 2]]"), "run.json: timeline");
}

}  // namespace
}  // namespace shardbook::sim
