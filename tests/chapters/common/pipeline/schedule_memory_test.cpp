// The walk down a rank's list, with actions of round sizes.

#include "chapters/common/pipeline/schedule_memory.h"

#include <gtest/gtest.h>

#include <vector>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"

namespace shardbook::pipeline {
namespace {

constexpr ActionKind F = ActionKind::kForward, B = ActionKind::kBackward,
                     I = ActionKind::kBackwardInput,
                     W = ActionKind::kBackwardWeight;

/// One rank with stages 0 and 1, two micro-batches.
Schedule two_chunks(const std::vector<Action>& actions) {
  Schedule schedule = schedules::interleaved(1, 2, 2);
  schedule.actions[0] = actions;
  return schedule;
}

Schedule one_chunk(const std::vector<Action>& actions) {
  Schedule schedule = gpipe::schedule(1, 2);
  schedule.actions[0] = actions;
  return schedule;
}

TEST(ScheduleMemory, MicroBatchesThatAreKeptAddUp) {
  // A weight and a bias; the first gradients are the parameters' own
  const RankParameters parameters = {{5, 1}, {{0, 1}}};
  const NeedsOf needs = [](const Action& action, const ActionState& state) {
    ActionBytes bytes;
    bytes.has_gradient = state.has_gradient;
    if (action.kind == F) {
      bytes.activations = 10;
      bytes.kept = 4;
      return bytes;
    }
    bytes.activations = state.has_gradient[0] ? 12 : 9;
    bytes.gradients = 6;
    bytes.has_gradient = {true, true};
    return bytes;
  };
  const auto peak = [&](const std::vector<Action>& actions) {
    return rank_peaks(one_chunk(actions), 0, parameters, needs);
  };
  EXPECT_EQ(peak({{F, 0}, {B, 0}}).activations, 10);  // forward's
  EXPECT_EQ(peak({{F, 0}, {F, 1}, {B, 1}, {B, 0}}).activations, 14);
  EXPECT_EQ(peak({{F, 0}, {B, 0}, {F, 1}, {B, 1}}).activations, 12);
  EXPECT_EQ(peak({{F, 0}, {B, 0}}).gradients, 6);
  EXPECT_EQ(peak({}).activations, 0);
}

// What a B finds between an I and its W: the bias has a gradient, the weight
// has none.
TEST(ScheduleMemory, ActionsFindTheGradientsOfThoseBefore) {
  const RankParameters parameters = {{5, 1}, {{0, 1}}};
  std::vector<std::vector<bool>> found;
  const NeedsOf needs = [&](const Action& action, const ActionState& state) {
    found.push_back(state.has_gradient);
    ActionBytes bytes;
    bytes.has_gradient = state.has_gradient;
    bytes.has_gradient[1] = bytes.has_gradient[1] || action.kind != F;
    bytes.has_gradient[0] =
        bytes.has_gradient[0] || action.kind == B || action.kind == W;
    return bytes;
  };
  rank_peaks(one_chunk({{F, 0}, {F, 1}, {I, 0}, {B, 1}, {W, 0}}), 0, parameters,
             needs);
  const std::vector<std::vector<bool>> expected = {{false, false},
                                                   {false, false},
                                                   {false, false},
                                                   {false, true},
                                                   {true, true}};
  EXPECT_EQ(found, expected);
}

// The table of the first stage is the head's weight: one gradient of 100 bytes.
TEST(ScheduleMemory, AParameterOfTwoChunksHasOneGradient) {
  const RankParameters parameters = {{100, 7, 3}, {{0, 1}, {2, 0}}};
  const NeedsOf needs = [&](const Action& action, const ActionState& state) {
    ActionBytes bytes;
    bytes.has_gradient = state.has_gradient;
    if (action.kind == F) return bytes;
    bytes.has_gradient = {true, true};
    bytes.gradients = action.chunk == 0 ? 107 : 103;
    return bytes;
  };
  EXPECT_EQ(rank_peaks(two_chunks({{F, 0, 0}, {F, 0, 1}, {B, 0, 1}, {B, 0, 0}}),
                       0, parameters, needs)
                .gradients,
            110);
}

/// A stage 0 whose output has 8 bytes (10 while it computes) and whose graph
/// may hold it until B or I, and a stage 1 whose graph and whose W need what it
/// took. Nothing else.
RankPeaks handed_over(const std::vector<Action>& actions, bool maker_holds,
                      std::vector<ActionState>* states = nullptr) {
  const NeedsOf needs = [=](const Action& action, const ActionState& state) {
    if (states != nullptr) states->push_back(state);
    ActionBytes bytes;
    bytes.output = bytes.input_gradient = 8;
    // While the stage works on it, and nobody else holds it, it is its own
    const Border border = action.chunk == 0 ? state.gives : state.takes;
    if (border == Border::kThisRank && action.kind != W) bytes.activations = 8;
    if (action.chunk == 0 && action.kind == F) bytes.activations = 10;
    bytes.holds_output = action.chunk == 0 && action.kind == F && maker_holds;
    bytes.holds_input =
        action.chunk == 1 && (action.kind == F || action.kind == I);
    return bytes;
  };
  return rank_peaks(two_chunks(actions), 0, {{}, {{}, {}}}, needs);
}

TEST(ScheduleMemory, ValuesHandedOverCountUntilBothStagesLetThemGo) {
  const std::vector<Action> one = {{F, 0, 0}, {F, 0, 1}, {B, 0, 1}, {B, 0, 0}};
  // One value, and then its gradient
  EXPECT_EQ(handed_over(one, false).activations, 10);
  // The first value waits while the stage makes the second
  const std::vector<Action> two = {{F, 0, 0}, {F, 1, 0}, {F, 0, 1}, {F, 1, 1},
                                   {B, 1, 1}, {B, 0, 1}, {B, 1, 0}, {B, 0, 0}};
  EXPECT_EQ(handed_over(two, false).activations, 18);
  // In B0 of the second stage: its value, the other one, whose maker holds it,
  // and the gradient of that one, which waits
  EXPECT_EQ(handed_over(two, true).activations, 24);
}

TEST(ScheduleMemory, ActionsFindWhatTheStageNextDoorHolds) {
  std::vector<ActionState> states;
  handed_over({{F, 0, 0}, {F, 0, 1}, {I, 0, 1}, {B, 0, 0}, {W, 0, 1}}, true,
              &states);
  ASSERT_EQ(states.size(), 5u);
  EXPECT_EQ(states[0].gives, Border::kThisRank);
  EXPECT_EQ(states[0].takes, Border::kOtherRank);
  EXPECT_EQ(states[1].takes, Border::kHeldNextDoor);
  EXPECT_EQ(states[1].gives, Border::kOtherRank);
  EXPECT_EQ(states[2].takes, Border::kHeldNextDoor);
  // I of stage 1 left the value for its W
  EXPECT_EQ(states[3].gives, Border::kHeldNextDoor);
  // B of stage 0 has let it go
  EXPECT_EQ(states[4].takes, Border::kThisRank);
}

}  // namespace
}  // namespace shardbook::pipeline
