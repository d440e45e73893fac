// The lists, as the literature has them; others are drawn in
// schedule_figures_test.cpp.

#include "chapters/06_1f1b/schedules.h"
#include "chapters/05_gpipe/gpipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "chapters/common/pipeline/schedule_check.h"
#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook::pipeline {
namespace {

using testing::HasSubstr;

/// "F0 F1 B0 B1".
std::string list(const Schedule& schedule, int rank) {
  std::string text;
  for (const Action& each : schedule.actions[static_cast<std::size_t>(rank)]) {
    text += (text.empty() ? "" : " ") + to_string(each);
  }
  return text;
}

TEST(Schedules, ListsOfFourRanks) {
  EXPECT_EQ(list(schedules::naive(4, 2), 3), "F0 B0 F1 B1");
  EXPECT_EQ(list(gpipe::schedule(4, 3), 2), "F0 F1 F2 B2 B1 B0");
}

TEST(Schedules, SplitBackwardsDelayTheWeights) {
  const Schedule h2 = schedules::zb_h2(2, 4);
  EXPECT_EQ(list(h2, 0), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
  EXPECT_EQ(list(h2, 1), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
}

// Narayanan et al. 2021, figure 4: four ranks, two chunks, eight micro-batches.
TEST(Schedules, InterleavedOrder) {
  const Schedule s = schedules::interleaved(4, 8, 2);
  EXPECT_EQ(s.num_stages, 8);
  EXPECT_EQ(s.stage_at(1, 1), 5);
  EXPECT_EQ(list(s, 3),
            "F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 "
            "F4 B0 F5 B1 F6 B2 F7 B3 F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 "
            "B4 B5 B6 B7");
  EXPECT_EQ(list(s, 0),
            "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 "
            "F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1 "
            "B2 B3 B4.1 B5.1 B6.1 B7.1 B4 B5 B6 B7");
  EXPECT_EQ(list(schedules::interleaved(4, 4, 2), 0),
            "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 "
            "B0.1 B1.1 B2.1 B3.1 B0 B1 B2 B3");
}

TEST(Schedules, AllAreSound) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int m : {1, 2, 3, 5, 8, 16, 24}) {
      check(schedules::naive(p, m));
      check(gpipe::schedule(p, m));
      check(schedules::one_f_one_b(p, m));
      check(schedules::zb_h1(p, m));
      check(schedules::zb_h2(p, m));
      for (const int v : {2, 3, 4}) {
        if (m % p == 0) check(schedules::interleaved(p, m, v));
      }
    }
  }
}

TEST(Schedules, HaveNames) {
  schedules::ScheduleOptions options{
      .num_ranks = 4, .micro_batches = 8, .batches = 2};
  for (const std::string& name : schedules::schedule_names()) {
    const Schedule schedule = schedules::make_schedule(name, options);
    EXPECT_EQ(schedule.name, name);
    EXPECT_EQ(schedule.num_micro_batches, schedule.flushes ? 8 : 16);
    check(schedule);
  }
  options.replicas = {2, 2};
  EXPECT_EQ(schedules::make_schedule("pipedream", options).num_stages, 2);
  EXPECT_THAT(
      error_of([&] {
        schedules::ScheduleOptions none = options;
        none.memory_limit = 0.5;
        schedules::make_schedule("zb-auto", none);
      }),
      HasSubstr("a memory limit of 0.5 sets of activations; give at least 1"));
  EXPECT_THAT(error_of([&] { schedules::make_schedule("1f2b", options); }),
              HasSubstr("--schedule 1f2b: give one of 1f1b, "));
}

TEST(Schedules, NumbersThatDoNotFitAreOneSentence) {
  using namespace schedules;
  EXPECT_EQ(error_of([] { interleaved(4, 6, 2); }),
            "--schedule interleaved: 6 micro-batches cannot be divided over "
            "4 ranks; give a multiple of 4, or take --schedule 1f1b");
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"1 chunk per rank; give at least 2", [] { interleaved(4, 8, 1); }},
      {"--schedule gpipe: 0 ranks", [] { gpipe::schedule(0, 1); }},
      {"--schedule dualpipe: 3 ranks; give an even number",
       [] { dualpipe(3, 6); }},
      {"6 micro-batches on 4 ranks; give an even number, at least 8",
       [] { dualpipe(4, 6); }},
      {"5 mini-batches cannot be divided over 2 replicas",
       [] {
         pipedream({2, 1}, 5);
       }},
      {"3 micro-batches on 4 ranks", [] { pipedream_2bw(4, 3, 2); }},
      {"0 micro-batches", [] { zb_h1(2, 0); }}};
  for (const auto& [words, make] : cases) {
    EXPECT_THAT(error_of(make), HasSubstr(words));
  }
}

/// The number behind `words` in a message; 0 if there is none.
int advised(const std::string& message, const std::string& words) {
  const auto at = message.find(words);
  return at == std::string::npos
             ? 0
             : std::atoi(message.c_str() + at + words.size());
}

/// Follows a message's advice; false if it gives none.
bool follow(const std::string& message, schedules::ScheduleOptions& o) {
  const int multiple = advised(message, "give a multiple of ");
  const int least = std::max(advised(message, "give at least "),
                             advised(message, "an even number, at least "));
  if (multiple > 0) {
    o.micro_batches = (o.micro_batches / multiple + 1) * multiple;
  } else if (least > 0) {
    o.micro_batches = least;
  } else if (message.ends_with("give an even number")) {
    o.num_ranks += 1;
  } else {
    return false;
  }
  return true;
}

// Contradictory advice would go round in circles.
TEST(Schedules, AdviceLeadsToASchedule) {
  for (const std::string& name : schedules::schedule_names()) {
    for (int point = 0; point < 6 * 14 * 8; ++point) {
      schedules::ScheduleOptions o;
      o.num_ranks = point % 6 + 1;
      o.micro_batches = point / 6 % 14 + 1;
      o.memory_limit = point / 84;
      std::string path = name, message;
      for (int hop = 0; hop < 3; ++hop) {
        message = error_of([&] { schedules::make_schedule(name, o); });
        if (message.empty()) break;
        path += "\n" + message;
        const auto other = message.find("take --schedule ");
        if (other != std::string::npos) {
          schedules::make_schedule(message.substr(other + 16), o);
        }
        ASSERT_TRUE(follow(message, o)) << path;
      }
      EXPECT_EQ(error_of([&] { schedules::make_schedule(name, o); }), "")
          << path;
    }
  }
}

}  // namespace
}  // namespace shardbook::pipeline
