// The parts of a training's state: the places of their elements, their writers,
// and errors for incomplete files.

#include "chapters/common/run/training_state.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "chapters/common/run/state_files.h"
#include "comm/launch.h"
#include "core/safetensors.h"
#include "tests/chapters/common/common_support.h"

namespace shardbook::common_test {
namespace {

class TrainingStateTest : public CommonFiles {
 protected:
  void SetUp() override { std::filesystem::create_directory(path("kept")); }
};

std::vector<float> count_up(std::int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

// Oracle: the part that core/shards.h copies from 0, 1, 2, ...
TEST_F(TrainingStateTest, RunsAreTheElementsOfTheFlattenedPart) {
  const Shape whole = {6, 12, 2};
  const Tensor all = Tensor::from_values(count_up(144), whole, Device::cpu(0));
  const std::vector<Shards> ways = {{},
                                    {{0, 2, 3, 1}},
                                    {{1, 1, 2, 3}},
                                    {{2, 0, 2, 1}},
                                    {{0, 1, 2, 1}, {1, 2, 3, 1}},
                                    {{1, 1, 3, 1}, {1, 0, 2, 1}}};
  for (const Shards& shards : ways) {
    const std::vector<double> part = take_part(all, shards).to_vector<double>();
    const auto n = static_cast<std::int64_t>(part.size());
    for (const auto& [begin, count] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, n}, {1, n - 1}, {n / 3, n / 2}, {n - 1, 1}, {2, 0}}) {
      std::vector<double> found;
      for (const IndexRun& run : flat_runs(shards, whole, begin, count)) {
        for (std::int64_t i = 0; i < run.count; ++i) {
          found.push_back(static_cast<double>(run.begin + i));
        }
      }
      EXPECT_EQ(found, std::vector<double>(part.begin() + begin,
                                           part.begin() + begin + count));
    }
  }
}

/// A parameter of which this rank holds elements [begin, begin + count).
TrainingState piece_of(const std::string& name, const Shape& whole,
                       std::int64_t begin, std::int64_t count) {
  StatePart part;
  part.name = name;
  part.whole = whole;
  part.begin = begin;
  std::vector<float> values = count_up(shape_numel(whole));
  part.values =
      Tensor::from_values(std::vector<float>(values.begin() + begin,
                                             values.begin() + begin + count),
                          {count}, Device::cpu(0));
  TrainingState state;
  state.parts.push_back(part);
  return state;
}

TEST_F(TrainingStateTest, ReplicasAreWrittenOnceAndInEqualShares) {
  // Eight parameters on each of four ranks, small and large ones in turn
  run_ranks(4, [&](ProcessGroup& world) {
    TrainingState state;
    for (int i = 0; i < 8; ++i) {
      const std::int64_t n = i % 2 == 0 ? 1000 : 10;
      state.parts.push_back(
          piece_of("p" + std::to_string(i), {n}, 0, n).parts[0]);
    }
    write_state_file(path("kept"), state, &world);
  });
  std::map<std::string, int> times;
  for (int rank = 0; rank < 4; ++rank) {
    const SafetensorsFile file = SafetensorsFile::open(
        path("kept") + "/" + safetensors_shard_name("rank", rank, 4));
    std::int64_t elements = 0;
    for (const SafetensorsEntry& each : file.entries()) {
      times[each.name] += 1;
      elements += each.shape[0];
    }
    EXPECT_NEAR(static_cast<double>(elements), 1010, 30) << "rank " << rank;
  }
  EXPECT_EQ(times.size(), 8u);
  for (const auto& [name, count] : times) EXPECT_EQ(count, 1) << name;
}

TEST_F(TrainingStateTest, PiecesOfAnyCutMakeAnyPart) {
  run_ranks(3, [&](ProcessGroup& world) {
    const std::int64_t begin[] = {0, 5, 17, 24};
    const int r = world.rank();
    write_state_file(path("kept"),
                     piece_of("w", {4, 6}, begin[r], begin[r + 1] - begin[r]),
                     &world);
  });
  const StateFiles files(path("kept"), 3);
  // Columns 3 to 5 of rows that were padded to six
  StatePart part;
  part.name = "w";
  part.whole = {4, 6};
  part.padded_rows = 6;
  part.shards = {{1, 1, 2, 1}};
  part.values = Tensor::full({6, 3}, -1, {DType::kF32, Device::cpu(0)});
  TrainingState state;
  state.parts.push_back(part);
  files.check(state, /*with_optimizer=*/true);
  files.load(state, /*with_optimizer=*/true);
  EXPECT_EQ(part.values.to_vector<double>(),
            (std::vector<double>{3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23, -1,
                                 -1, -1, -1, -1, -1}));
}

TEST_F(TrainingStateTest, WhatIsMissingIsNamed) {
  write_state_file(path("kept"), piece_of("w", {4, 6}, 6, 18), nullptr);
  const StateFiles files(path("kept"), 1);
  const auto expect_refused = [&](const TrainingState& state,
                                  const std::vector<std::string>& parts) {
    expect_error([&] { files.check(state, /*with_optimizer=*/true); }, parts);
  };
  expect_refused(piece_of("v", {4, 6}, 0, 24), {"holds no parameter of 'v'"});
  expect_refused(piece_of("w", {6, 4}, 0, 24),
                 {"'w' has shape [4, 6]", "[6, 4]"});
  expect_refused(piece_of("w", {4, 6}, 0, 24), {"holds 18 of the 24 elements"});
  TrainingState wide = piece_of("w", {4, 6}, 6, 18);
  wide.parts[0].values = Tensor::zeros({18}, {DType::kF64, Device::cpu(0)});
  expect_refused(wide, {"'w' is F32", "f64"});
}

// Two overlapping pieces have as many elements as the whole, but not all
TEST_F(TrainingStateTest, AHoleBetweenPiecesIsFound) {
  run_ranks(2, [&](ProcessGroup& world) {
    write_state_file(path("kept"),
                     piece_of("w", {4, 6}, world.rank() == 0 ? 0 : 2, 14),
                     &world);
  });
  const StateFiles files(path("kept"), 2);
  const TrainingState state = piece_of("w", {4, 6}, 0, 24);
  files.check(state, /*with_optimizer=*/true);
  expect_error([&] { files.load(state, /*with_optimizer=*/true); },
               {"no file holds element 16 of parameter of 'w'"});
}

TEST_F(TrainingStateTest, TheOptimizersStateMovesWithItsElements) {
  const auto make = [](std::int64_t n) {
    const Tensor p = Tensor::zeros({n}, {DType::kF32, Device::cpu(0)});
    p.set_requires_grad(true);
    return make_optimizer("adamw", {p}, {});
  };
  // One slot of two parameters, one after the other
  const auto flat = make(8);
  flat->step_one(0, Tensor::from_values(count_up(8), {8}, Device::cpu(0)));
  TrainingState two;
  for (int i = 0; i < 2; ++i) {
    StatePart part;
    part.name = i == 0 ? "a" : "b";
    part.whole = {4};
    part.values = flat->parameters()[0].flat_view(4 * i, {4});
    part.optimizer = flat.get();
    part.slot_begin = 4 * i;
    two.parts.push_back(part);
  }
  write_state_file(path("kept"), two, nullptr);

  const auto alone = make(4);
  TrainingState one;
  add_whole(one, {{"b", alone->parameters()[0]}}, *alone);
  const StateFiles files(path("kept"), 1);
  files.check(one, /*with_optimizer=*/true);
  files.load(one, /*with_optimizer=*/true);
  EXPECT_EQ(alone->slots()[0].step, 1);
  for (std::size_t s = 0; s < 2; ++s) {
    EXPECT_EQ(alone->slots()[0].state[s].to_vector<double>(),
              flat->slots()[0].state[s].flat_view(4, {4}).to_vector<double>());
  }
  EXPECT_EQ(alone->parameters()[0].to_vector<double>(),
            flat->parameters()[0].flat_view(4, {4}).to_vector<double>());
}

}  // namespace
}  // namespace shardbook::common_test
