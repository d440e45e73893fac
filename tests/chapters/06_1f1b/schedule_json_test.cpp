// Schedules as files: reading gives the written schedule, and errors name the
// wrong value.

#include "chapters/06_1f1b/schedule_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "chapters/06_1f1b/schedules.h"
#include "core/check.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::pipeline {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using shardbook::error_of;
std::string error_of(const std::string& text) {
  const std::string error =
      error_of([&] { schedule_from_json(text, "mine.json"); });
  if (error.empty()) return "";
  EXPECT_THAT(error, StartsWith("mine.json: "));
  return error.substr(11);
}

TEST(ScheduleJson, ReadsWhatTheHeaderSays) {
  const Schedule s = schedule_from_json(
      R"({"_": "a remark", "name": "mine", "micro_batches": 2,
          "ranks": ["F0 F1 B0 B1", "F0 B0  F1\nB1"]})",
      "mine.json");
  EXPECT_EQ(s.name, "mine");
  EXPECT_EQ(s.num_ranks, 2);
  EXPECT_EQ(s.num_stages, 2);
  EXPECT_EQ(to_string(s.actions[1][2]), "F1");
  EXPECT_EQ(s.place(1, 1).rank, 1);
  EXPECT_TRUE(s.flushes);
}

TEST(ScheduleJson, AnUpdateAloneTakesAllSoFar) {
  const Schedule s = schedule_from_json(
      R"({"micro_batches": 4, "micro_batches_per_step": 2,
          "ranks": ["F0 F1 B0 B1 U F2 F3 B2 B3 U"]})",
      "");
  EXPECT_FALSE(s.flushes);
  EXPECT_EQ(to_string(s.actions[0][4]), "U1");
  EXPECT_EQ(to_string(s.actions[0][9]), "U3");
}

TEST(ScheduleJson, WrittenAndReadIsTheSame) {
  const schedules::ScheduleOptions options{
      .num_ranks = 4, .micro_batches = 8, .batches = 2};
  std::vector<Schedule> all = {schedules::pipedream({3, 2, 1}, 12, true)};
  for (const std::string& name : schedules::schedule_names()) {
    all.push_back(schedules::make_schedule(name, options));
  }
  for (const Schedule& one : all) {
    const std::string text = to_json(one);
    const Schedule two = schedule_from_json(text, one.name);
    EXPECT_EQ(to_json(two), text);
    EXPECT_EQ(two.num_stages, one.num_stages);
    EXPECT_EQ(two.flushes, one.flushes);
    EXPECT_EQ(two.versions, one.versions);
    EXPECT_EQ(two.micro_batches_per_step, one.micro_batches_per_step);
  }
}

TEST(ScheduleJson, NamesFileKeyValueAndWhatIsAllowed) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "no JSON: the first mistake is at byte 1"},
      {"[1e999]", "a number is too large"},
      {R"({"micro_batches": )" + std::string(100, '[') + std::string(100, ']') +
           "}",
       "nested more than 64 deep; give at most 64 levels"},
      {"[]", "[]; give an object with \"micro_batches\" and \"ranks\""},
      {"{}", "key \"micro_batches\" is missing"},
      {R"({"micro_batches": 1})", "key \"ranks\" is missing"},
      {R"({"micro_batches": 0, "ranks": [""]})",
       "micro_batches is 0; give a whole number from 1 to 65536"},
      {R"({"micro_batches": 1.5, "ranks": [""]})", "micro_batches is 1.5"},
      {R"({"micro_batches": 1, "ranks": []})",
       "ranks is []; give a list of 1 to 1024"},
      {R"({"micro_batches": 1, "ranks": [3]})", "ranks[0] is 3; give a string"},
      {R"({"micro_batches": 1, "ranks": ["F0 Q3"]})",
       "ranks[0], action 1: \"Q3\"; give F, B, I, W or U with a micro-batch, "
       "such as F0, B3.1 or F5&B2"},
      {R"({"micro_batches": 1, "ranks": ["F"]})", "action 0: \"F\""},
      {R"({"micro_batches": 1, "ranks": ["F0x"]})", "action 0: \"F0x\""},
      {R"({"micro_batches": 1, "ranks": ["F99999999"]})", "action 0: \"F9"},
      {R"({"micro_batches": 1, "ranks": ["F0&"]})", "\"F0&\""},
      {R"({"micro_batches": 1, "ranks": ["F0."]})", "\"F0.\""},
      {R"({"micro_batches": 1, "ranks": ["F0 B0"], "color": 3})",
       "unknown key \"color\"; known are name, "},
      {R"({"micro_batches": 1, "ranks": ["F0 B0"], "name": "a'b"})",
       "name is \"a'b\"; give 1 to 40 plain characters"},
      {R"({"micro_batches": 1, "ranks": ["F0 B0"], "routes": [["1"]]})",
       "routes[0][0] is \"1\"; give a rank below 1"},
      {R"({"micro_batches": 1, "ranks": ["F0 B0"], "route_of": [1]})",
       "route_of[0] is 1; give a whole number from 0 to 0"},
      {R"({"micro_batches": 1, "ranks": ["F0 B0"], "versions": "old"})",
       "versions is \"old\"; give newest, first-stage or delay-one"},
      {R"({"micro_batches": 65536, "ranks": ["F0"], "routes": [["0.99"]]})",
       "6553600 chunks times micro-batches; give at most 1048576"},
      {R"({"micro_batches": 4, "micro_batches_per_step": 2,
           "ranks": ["F0 F1 F2 F3 B0 B1 B2 B3"]})",
       "2 micro-batches per step; a schedule without updates is one step; give "
       "4"},
      {R"({"name": "x", "micro_batches": 1, "ranks": ["B0 F0"]})",
       "schedule 'x': tick 0, rank 0: B0 before its forward F0"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(error_of(text), HasSubstr(message)) << text;
  }
}

TEST(ScheduleJson, FilesStandWhereNamesDo) {
  const TempFolder folder;
  const std::string file = folder / "mine.json";
  std::ofstream(file) << to_json(schedules::zb_h1(2, 4));
  const auto made = [&](int ranks, int micro_batches) {
    return schedules::make_schedule(
        file, {.num_ranks = ranks, .micro_batches = micro_batches});
  };
  EXPECT_EQ(to_json(made(2, 4)), to_json(schedules::zb_h1(2, 4)));
  EXPECT_THROW(made(3, 4), Error);
  EXPECT_THROW(made(2, 8), Error);
  std::remove(file.c_str());
  EXPECT_THROW(read_schedule(file), Error);
  EXPECT_THROW(read_schedule(folder.path()), Error);
}

}  // namespace
}  // namespace shardbook::pipeline
