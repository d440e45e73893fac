// Unsound schedules, and the first rule that each breaks.

#include <gtest/gtest.h>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook::pipeline {
namespace {

constexpr ActionKind F = ActionKind::kForward, B = ActionKind::kBackward,
                     I = ActionKind::kBackwardInput,
                     W = ActionKind::kBackwardWeight, U = ActionKind::kUpdate;

using List = std::vector<Action>;

/// Stage s at rank s.
Schedule mine(int micro_batches, const std::vector<List>& lists) {
  Schedule schedule =
      gpipe::schedule(static_cast<int>(lists.size()), micro_batches);
  schedule.name = "mine";
  schedule.actions = lists;
  return schedule;
}

/// The text after "schedule 'mine': ".
std::string fault(const Schedule& schedule) {
  const std::string start = "schedule '" + schedule.name + "': ";
  try {
    check(schedule);
  } catch (const Error& error) {
    const std::string text = error.what();
    return text.rfind(start, 0) == 0 ? text.substr(start.size()) : text;
  }
  return "";
}

TEST(Check, NamesTickAndRankOfTheFirstViolation) {
  EXPECT_EQ(fault(mine(1, {{{F}, {B}}, {{F}, {B}}})), "");
  EXPECT_EQ(fault(mine(2, {{{F, 0}, {F, 1}, {B, 0}, {B, 1}},
                           {{F, 0}, {B, 1}, {F, 1}, {B, 0}}})),
            "tick 2, rank 1: B1 before its forward F1");
  // Two ranks break a rule; the other one does so earlier
  EXPECT_EQ(
      fault(mine(2, {{{F, 0}, {F, 1}, {F, 1}}, {{F, 0}, {B, 0}, {B, 0}}})),
      "tick 2, rank 0: F1 a second time");
}

TEST(Check, EverythingOnceAndWhole) {
  const auto alone = [](int m, const List& list) {
    return fault(mine(m, {list}));
  };
  EXPECT_EQ(alone(1, {{F}}), "tick 1, rank 0: ends without B0");
  EXPECT_EQ(alone(2, {{F}, {B}}), "tick 2, rank 0: ends without F1");
  EXPECT_EQ(alone(1, {{F}, {I}}), "tick 2, rank 0: ends without W0");
  EXPECT_EQ(alone(1, {}), "tick 0, rank 0: ends without F0");
  EXPECT_EQ(alone(1, {{F}, {B}, {B}}), "tick 2, rank 0: B0 a second time");
  EXPECT_EQ(alone(1, {{F}, {I}, {B}}),
            "tick 2, rank 0: B0 after another backward of micro-batch 0");
  EXPECT_EQ(alone(1, {{F}, {W}, {I}}),
            "tick 1, rank 0: W0 before its input gradient I0");
  EXPECT_EQ(alone(1, {{F}, {B}, {W}}),
            "tick 2, rank 0: W0 after the whole backward of it");
  EXPECT_EQ(alone(2, {{F, 0}, {F, 1}, {I, 0}, {I, 1}, {W, 1}, {W, 0}}),
            "tick 4, rank 0: W1 while W0 has waited longer; they run first "
            "in, first out");
}

TEST(Check, NumbersInRange) {
  EXPECT_EQ(fault(mine(1, {{{F, 7}}})),
            "tick 0, rank 0: F7 for micro-batch 7; there are 1");
  EXPECT_EQ(fault(mine(1, {{{F, -1}}})),
            "tick 0, rank 0: F-1 for micro-batch -1; there are 1");
  EXPECT_EQ(fault(mine(1, {{{F, 0, 2}}})),
            "tick 0, rank 0: F0.2 for chunk 2; there are 1");
  Schedule none;
  none.name = "none";
  EXPECT_EQ(fault(none),
            "0 ranks, 0 stages and 0 micro-batches; give at least 1 of each");
  Schedule short_lists = gpipe::schedule(2, 2);
  short_lists.actions.pop_back();
  EXPECT_EQ(fault(short_lists), "lists for 1 rank; give one for each of 2");
}

TEST(Check, RoutesFitTogether) {
  Schedule s = gpipe::schedule(2, 2);
  s.routes[0][1] = {0, 0};
  EXPECT_EQ(fault(s),
            "stages 0 and 1 lie at chunk 0 of rank 0; give each a "
            "chunk of its own");
  s.routes[0][1] = {2, 0};
  EXPECT_EQ(fault(s), "stage 1 lies at rank 2; give 0 to 1");
  s.routes[0][1] = {0, 1};
  EXPECT_EQ(fault(s), "no stage lies at rank 1");
  s = gpipe::schedule(2, 2);
  s.routes.push_back({{1, 0}, {0, 0}});
  EXPECT_EQ(fault(s),
            "stages 1 and 0 lie at chunk 0 of rank 1; give each a "
            "chunk of its own");
  s = gpipe::schedule(2, 2);
  s.route_of[1] = 1;
  EXPECT_EQ(fault(s), "a micro-batch takes route 1 of 1");
  s.route_of.pop_back();
  EXPECT_EQ(fault(s), "routes for 1 micro-batch of 2");
  // The other replica's mini-batch
  s = schedules::pipedream({2, 1}, 4);
  s.actions[1][0].micro_batch = 0;
  EXPECT_EQ(fault(s), "tick 0, rank 1: F0, whose route does not lead here");
}

TEST(Check, DeadlocksNameTheirCycle) {
  // Rank 0 wants a gradient before it sends what rank 1 reads first
  EXPECT_EQ(fault(mine(2, {{{F, 0}, {B, 0}, {F, 1}, {B, 1}},
                           {{F, 0}, {F, 1}, {B, 0}, {B, 1}}})),
            "tick 1, rank 0: deadlock: rank 0 (at B0) waits for B0 of rank 1, "
            "rank 1 (at F1) waits for F1 of rank 0");
  // Micro-batches in an order that the stage before does not send
  EXPECT_EQ(fault(mine(2, {{{F, 0}, {B, 0}, {F, 1}, {B, 1}},
                           {{F, 1}, {B, 1}, {F, 0}, {B, 0}}})),
            "tick 1, rank 0: deadlock: rank 0 (at B0) waits for B0 of rank 1, "
            "rank 1 (at F1) waits for F1 of rank 0");
}

// Every rank waits for the gradient of a micro-batch that it still holds back.
TEST(Check, LongCyclesAreCutShort) {
  std::vector<List> lists(20, {{F, 0}, {F, 1}, {B, 0}, {B, 1}});
  lists[19] = {{F, 0}, {F, 1}, {B, 1}, {B, 0}};
  lists[0] = {{F, 0}, {B, 0}, {F, 1}, {B, 1}};
  const std::string text = fault(mine(2, lists));
  expect_text(text, {"deadlock: rank 0 (at B0) waits for B0 of rank 1, rank "
                     "1 (at F1) waits for F1 of rank 0"});
  // Across all ranks: the last forward waits for the first backward
  for (List& list : lists) list = {{F, 0}, {F, 1}, {B, 0}, {B, 1}};
  lists[19] = {{F, 1}, {B, 1}, {F, 0}, {B, 0}};
  lists[0] = {{F, 0}, {B, 0}, {F, 1}, {B, 1}};
  EXPECT_LT(fault(mine(2, lists)).size(), 500u);
}

// Backwards in different orders on both sides: messages wait, no rank hangs.
TEST(Check, OrdersMayDifferWhereNobodyWaitsInACircle) {
  EXPECT_EQ(fault(mine(2, {{{F, 0}, {F, 1}, {B, 1}, {B, 0}},
                           {{F, 0}, {F, 1}, {B, 0}, {B, 1}}})),
            "");
}

TEST(Check, Pairs) {
  const auto pair = [](Action first, Action second) {
    first.overlaps_next = true;
    return fault(mine(2, {{{F, 0}, first, second, {B, 1}}}));
  };
  EXPECT_EQ(pair({F, 1}, {B, 0}), "");
  EXPECT_EQ(pair({F, 1}, {B, 1}),
            "tick 1, rank 0: F1 overlaps B1, which needs it");
  EXPECT_EQ(pair({B, 0}, {F, 1}),
            "tick 1, rank 0: B0 overlaps F1; a pair is "
            "a forward and a backward");
  EXPECT_EQ(fault(mine(2, {{{F, 0}, {F, 1}, {B, 0, 0, true}, {B, 1}}})),
            "tick 2, rank 0: B0 overlaps B1; a pair is "
            "a forward and a backward");
  EXPECT_EQ(
      fault(mine(2, {{{F, 0}, {F, 1, 0, true}, {B, 0, 0, true}, {B, 1}}})),
      "tick 1, rank 0: F1 overlaps B0, which overlaps a third");
  EXPECT_EQ(fault(mine(1, {{{F}, {B, 0, 0, true}}})),
            "tick 1, rank 0: B0 overlaps nothing");
}

TEST(Check, UpdatesHaveTheirGradientsAndNoOthers) {
  const auto stream = [](const List& list) {
    Schedule schedule = mine(2, {list});
    schedule.flushes = false;
    schedule.micro_batches_per_step = 1;
    return fault(schedule);
  };
  EXPECT_EQ(stream({{F}, {B}, {U}, {F, 1}, {B, 1}, {U, 1}}), "");
  EXPECT_EQ(stream({{F}, {B}, {U, 1}}),
            "tick 2, rank 0: U1 before the gradient of micro-batch 1");
  EXPECT_EQ(stream({{F}, {F, 1}, {B}, {B, 1}, {U, 0}}),
            "tick 4, rank 0: U0 after the gradient of micro-batch 1, which it "
            "does not claim");
  EXPECT_EQ(stream({{F}, {B}, {U}, {U}}),
            "tick 2, rank 0: U0 after an update that claims as much");
  EXPECT_EQ(stream({{F}, {B}, {U}, {F, 1}, {B, 1}}),
            "tick 4, rank 0: ends without the update for micro-batch 1");
  // After "backward(0) is done" its gradient is incomplete: W0 is missing
  EXPECT_EQ(stream({{F}, {I}, {U}, {W}}),
            "tick 2, rank 0: U0 before the gradient of micro-batch 0");
  EXPECT_EQ(fault(mine(1, {{{F}, {B}, {U}}})),
            "tick 2, rank 0: U0 in a schedule that flushes: its update "
            "follows the lists");
}

// The gradients of biases and norms are complete after I.
TEST(Check, UpdatesHaveNoBiasesOfLaterMicroBatches) {
  Schedule s = mine(2, {{{F}, {F, 1}, {I}, {I, 1}, {W}, {U}, {W, 1}, {U, 1}}});
  s.flushes = false;
  s.micro_batches_per_step = 1;
  EXPECT_EQ(fault(s),
            "tick 5, rank 0: U0 after the gradient of micro-batch 1, which it "
            "does not claim");
}

TEST(Check, StepsHaveTheirSize) {
  Schedule flushing = schedules::one_f_one_b(2, 4);
  flushing.micro_batches_per_step = 2;
  EXPECT_EQ(fault(flushing),
            "2 micro-batches per step; a schedule without updates is one step; "
            "give 4");
  Schedule s = schedules::pipedream_2bw(2, 2, 3);
  s.micro_batches_per_step = 4;
  EXPECT_EQ(fault(s),
            "4 micro-batches per step; give a divisor of 6, the micro-batches");
  // Ranks that update at different rates
  s = mine(2, {{{F}, {B}, {U}, {F, 1}, {B, 1}, {U, 1}},
               {{F}, {B}, {F, 1}, {B, 1}, {U, 1}}});
  s.flushes = false;
  s.micro_batches_per_step = 1;
  EXPECT_EQ(fault(s),
            "tick 7, rank 1: U1 claims 2 micro-batches; each update of this "
            "stage claims 1 (micro_batches_per_step times the stage's ranks)");
  // Updates of every micro-batch in steps of two
  s = schedules::pipedream(1, 4);
  s.micro_batches_per_step = 2;
  EXPECT_EQ(fault(s),
            "tick 2, rank 0: U0 claims 1 micro-batch; each update of this "
            "stage claims 2 (micro_batches_per_step times the stage's ranks)");
}

// Vertical sync: stage 0 reads a version that the next stage does not have yet.
TEST(Check, FirstStagesVersionExistsEverywhere) {
  Schedule s = mine(
      3, {{{F}, {B}, {U}, {F, 1}, {B, 1}, {U, 1}, {F, 2}, {B, 2}, {U, 2}},
          {{F}, {B}, {F, 1}, {U}, {B, 1}, {U, 1}, {F, 2}, {B, 2}, {U, 2}}});
  s.flushes = false;
  s.micro_batches_per_step = 1;
  EXPECT_EQ(fault(s), "");
  s.versions = VersionRule::kFirstStage;
  EXPECT_EQ(fault(s),
            "tick 3, rank 1: F1 reads version 1 of the weights, which no "
            "update has made yet");
}

// Replicas average their gradients: none continues before all have reached the
// update.
TEST(Check, ReplicasWaitForEachOther) {
  Schedule s = schedules::pipedream({1, 2}, 4);
  s.actions[0] = {{F},    {F, 1}, {B},    {U},    {B, 1}, {U, 1},
                  {F, 2}, {B, 2}, {U, 2}, {F, 3}, {B, 3}, {U, 3}};
  s.actions[1] = {{F}, {B}, {U, 1}, {F, 2}, {B, 2}, {U, 3}};
  s.actions[2] = {{F, 1}, {B, 1}, {U, 1}, {F, 3}, {B, 3}, {U, 3}};
  EXPECT_EQ(fault(s), "");
  // Rank 2 wants F3 before the update, rank 0 wants B2 before F3
  s.actions[2] = {{F, 1}, {B, 1}, {F, 3}, {U, 1}, {B, 3}, {U, 3}};
  EXPECT_EQ(fault(s),
            "tick 6, rank 0: deadlock: rank 0 (at B2) waits for B2 of rank 1, "
            "rank 1 (at U1) waits for F3 of rank 2, rank 2 (at F3) waits for "
            "F3 of rank 0");
  // One replica lacks the update at which the others wait for it
  s.actions[2] = {{F, 1}, {B, 1}, {F, 3}, {B, 3}};
  expect_text(fault(s), {"rank 1 (at U1) waits for U1 of rank 2"});
}

TEST(Check, ChunksAreNumberedFromZero) {
  Schedule s = gpipe::schedule(2, 1);
  s.routes[0][1].chunk = 1;
  EXPECT_EQ(fault(s),
            "rank 1 has a stage at chunk 1 and none at chunk 0; number chunks "
            "from 0");
}

// More forwards under way than two versions of the weights allow.
TEST(Check, DoubleBuffersReadVersionsThatExist) {
  Schedule s = mine(6, {{{F, 0}, {F, 1}, {F, 2}, {F, 3}, {F, 4}, {B, 0}}});
  s.flushes = false;
  s.versions = VersionRule::kDelayOne;
  s.micro_batches_per_step = 2;
  EXPECT_EQ(fault(s),
            "tick 4, rank 0: F4 reads version 1 of the weights, "
            "which no update has made yet");
}

}  // namespace
}  // namespace shardbook::pipeline
