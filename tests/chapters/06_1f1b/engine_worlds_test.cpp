// Runs with data count what the world `sim` counts on shapes and what the bills
// predict.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/run/worlds.h"
#include "core/check.h"
#include "tests/chapters/06_1f1b/worlds_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook::pipeline_test {
namespace {

/// Under a sanitizer, one schedule for each way to run an action: whole and
/// split backwards, several stages per rank, two copies of a stage, checks of
/// the update, versions of weights, replicas of a stage.
std::vector<Variant> few_variants() {
  std::vector<Variant> few = {
      variant("1f1b", 3),         variant("interleaved", 2),
      variant("dualpipe", 2),     variant("zb-h2", 3),
      variant("pipedream", 3),    variant("pipedream", 3),
      variant("pipedream-2bw", 3)};
  few[3].setup.post_validation = true;
  few[4].setup.vertical_sync = true;
  few[5].setup.replicas = "2,1";
  return few;
}

std::vector<Variant> variants() {
  std::vector<Variant> all = few_variants();
  if (kSanitized) return all;
  for (const auto& [schedule, world_size] : {std::pair("naive", 2),
                                             {"gpipe", 4},
                                             {"1f1b", 1},
                                             {"1f1b", 2},
                                             {"1f1b", 8},
                                             {"interleaved", 4},
                                             {"zb-h1", 4},
                                             {"zb-h1", 8},
                                             {"zb-h2", 3},
                                             {"zb-h2", 4},
                                             {"zb-auto", 4},
                                             {"dualpipe", 4},
                                             {"pipedream", 4},
                                             {"pipedream-2bw", 4}}) {
    all.push_back(variant(schedule, world_size));
  }
  return all;
}

// All four claims, for every schedule.
TEST(EngineWorlds, SchedulesCountOnThreadsWhatSimCharges) {
  for (const Variant& each : variants()) {
    SCOPED_TRACE(each.name + " on " + std::to_string(each.world_size));
    Options options = worlds_options(each.world_size);
    const bool is_asynchronous =
        pipeline::make_plan(options, each.setup).is_asynchronous();
    options.backend = "threads";
    const auto [threads, parity] =
        expect_trained_as_one_device(options, each.setup);
    if (is_asynchronous) {
      // The sums over a loss's micro-batches are rounded at another point
      EXPECT_LE(parity.max_abs, 1e-6);
    }

    options.backend = "sim";
    const WorldRun shapes = run_strategy(options, each.setup);
    expect_bill(shapes.report);
    ASSERT_EQ(shapes.report.ranks.size(), threads.report.ranks.size());
    for (std::size_t r = 0; r < shapes.report.ranks.size(); ++r) {
      const RankReport& a = threads.report.ranks[r];
      const RankReport& b = shapes.report.ranks[r];
      EXPECT_EQ(a.bytes.counted, b.bytes.counted);
      for (const MemoryKind kind :
           {MemoryKind::kActivation, MemoryKind::kGradient,
            MemoryKind::kParameter, MemoryKind::kOptimizerState}) {
        const auto k = static_cast<std::size_t>(kind);
        EXPECT_EQ(a.peak[k].counted, b.peak[k].counted);
      }
    }
  }
}

TEST(EngineWorlds, AUsersOwnScheduleRuns) {
  const TempFolder folder;
  const std::string file = folder / "mine.json";
  std::ofstream(file) << R"({"name": "mine", "micro_batches": 2,
                             "ranks": ["F0 F1 B0 B1", "F0 F1 B0 B1"]})";
  Options options = worlds_options(2);
  options.batch = 4;
  const StrategyOptions setup{.schedule = file};
  const Plan plan = pipeline::make_plan(options, setup);
  EXPECT_EQ(plan.schedule.name, "mine");
  EXPECT_EQ(plan.pieces.size(), 2u);
  expect_trained_as_one_device(options, setup);
}

// The last stage sends the loss before its update, because rank 0 receives the
// loss while the last stage waits for rank 0.
TEST(EngineWorlds, LossesDoNotWaitForUpdates) {
  const TempFolder folder;
  const std::string file = folder / "late.json";
  std::ofstream(file) << R"({"micro_batches": 2, "ranks":
                             ["F0 B0 U F1 B1 U", "F0 B0 F1 U0 B1 U"]})";
  Options options = worlds_options(2);
  options.steps = 2;
  options.timeout_s = 20;
  expect_trained_as_one_device(options, {.schedule = file});
}

TEST(EngineWorlds, WrittenSchedulesRun) {
  const TempFolder folder;
  StrategyOptions setup{.schedule = "zb-auto",
                        .micro_batches = 6,
                        .memory_limit = 3,
                        .write_schedule = folder / "found.json"};
  Options options = worlds_options(2);
  options.batch = 6;
  const Plan written = pipeline::make_plan(options, setup);
  pipeline::show_schedule(written, setup);
  const StrategyOptions again{.schedule = setup.write_schedule};
  EXPECT_EQ(to_json(pipeline::make_plan(options, again).schedule),
            to_json(written.schedule));
  expect_trained_as_one_device(options, again);
  const auto error = [&](const std::string& path, std::int64_t steps) {
    setup.schedule = "pipedream";
    setup.write_schedule = path;
    options.steps = steps;
    return error_of([&] {
      pipeline::show_schedule(pipeline::make_plan(options, setup), setup);
    });
  };
  EXPECT_THAT(error(folder / "mine.txt", 4),
              ::testing::HasSubstr("mine.txt: give a FILE.json"));
  EXPECT_THAT(
      error(folder / "no/mine.json", 4),
      ::testing::HasSubstr("no/mine.json: this file cannot be written"));
  EXPECT_THAT(error(folder / "mine.json", 1000),
              ::testing::HasSubstr("repeat themselves; give at most --steps"));
}

// No schedule counts on buffers: a send may wait for its receiver.
TEST(EngineWorlds, SchedulesNeedNoBuffers) {
  for (const int p : sized<int>({2, 3, 4, 8}, {3})) {
    for (const std::string& name : pipeline::schedules::schedule_names()) {
      if (p % 2 == 1 && name == "dualpipe") continue;  // of pairs of ranks
      SCOPED_TRACE(name + " on " + std::to_string(p));
      Variant each = variant(name, p);
      each.setup.micro_batches = 2 * p;
      each.setup.post_validation = name == "1f1b" || name == "zb-h1";
      Options options = worlds_options(p);
      options.model = R"({"n_layer": 14, "n_embd": 8, "n_head": 2,
                          "n_positions": 4, "vocab_size": 16})";
      options.seq = 4;
      options.batch = 2 * p;
      options.steps = 2;
      // Clocks travel in messages of their own
      options.cluster = p == 3 ? "dgx-a100" : "none";
      const WorldRun buffered = run_strategy(options, each.setup);
      options.rendezvous_sends = true;
      const WorldRun waiting = run_strategy(options, each.setup);
      EXPECT_EQ(waiting.report.losses, buffered.report.losses);
      EXPECT_EQ(waiting.report.losses.size(), 2u);
    }
  }
}

// The lists, and the predictions on shapes, do not grow with the steps.
TEST(EngineWorlds, LongRunsHaveShortLists) {
  for (const auto& [schedule, replicas] :
       {std::pair("pipedream", ""), std::pair("pipedream", "2,1,1"),
        std::pair("pipedream-2bw", "")}) {
    SCOPED_TRACE(std::string(schedule) + " " + replicas);
    const StrategyOptions setup{.schedule = schedule, .replicas = replicas};
    Options options = worlds_options(4);
    std::vector<std::size_t> sizes;
    for (const std::int64_t steps : {1000, 1000000}) {
      options.steps = steps;
      const Plan plan = pipeline::make_plan(options, setup);
      const auto m = static_cast<int>(plan.pieces.size());
      EXPECT_EQ(plan.schedule.total_micro_batches(), steps * m);
      sizes.push_back(plan.schedule.actions[0].size());
      Options shapes = options;
      EXPECT_EQ(plan.on_shapes(&shapes).schedule.repeats, 0);
      EXPECT_LT(shapes.steps, 100);
      EXPECT_EQ(plan.schedule.num_micro_batches, shapes.steps * m);
    }
    EXPECT_EQ(sizes[0], sizes[1]);
    options.steps = std::int64_t{1} << 39;
    EXPECT_THROW(pipeline::make_plan(options, setup), Error);
  }
}

TEST(EngineWorlds, LongRunsKeepTheirClaims) {
  for (const char* replicas : sized<const char*>({"", "2,1"}, {"2,1"})) {
    const StrategyOptions setup{.schedule = "pipedream", .replicas = replicas};
    Options options = worlds_options(3);
    options.model = "mlp";
    options.batch = 2;
    options.seq = 4;
    options.steps = 90;
    ASSERT_GT(pipeline::make_plan(options, setup).schedule.repeats, 0);
    expect_trained_as_one_device(options, setup);
  }
}

// Rank 0 updates every second step and has both steps' losses.
TEST(EngineWorlds, ReplicasLogEveryStep) {
  const TempFolder folder;
  Options options = worlds_options(3);
  options.steps = 8;
  options.log = folder / "log.jsonl";
  const StrategyOptions setup{.schedule = "pipedream", .replicas = "2,1"};
  const WorldRun threads = run_strategy(options, setup);
  const ReferenceRun one = pipeline::reference_run(
      options, setup, pipeline::make_plan(options, setup));
  ASSERT_EQ(threads.report.losses.size(), 8u);
  std::ifstream log(options.log);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(log, line);) {
    lines.push_back(nlohmann::json::parse(line));
  }
  ASSERT_EQ(lines.size(), 8u);
  for (std::size_t k = 0; k < 8; ++k) {
    EXPECT_EQ(lines[k]["step"], k);
    EXPECT_DOUBLE_EQ(lines[k]["loss"], threads.report.losses[k]);
    EXPECT_NEAR(lines[k]["loss"], one.losses[k], 1e-5);
    // Steps of one update share its norm and its time
    EXPECT_EQ(lines[k]["grad_norm"], lines[k / 2 * 2]["grad_norm"]);
    EXPECT_EQ(lines[k]["wall_s"], lines[k / 2 * 2]["wall_s"]);
    EXPECT_DOUBLE_EQ(lines[k]["tokens_per_s"].get<double>() *
                         lines[k]["wall_s"].get<double>(),
                     static_cast<double>(options.batch * options.seq));
    if (k >= 2) {
      EXPECT_NE(lines[k]["grad_norm"], lines[k - 2]["grad_norm"]);
    }
  }
}

using Change = std::function<void(Options&, StrategyOptions&)>;

template <typename Owner, typename Field, typename Value>
Change set(Field Owner::*field, Value value) {
  return [=](Options& options, StrategyOptions& setup) {
    if constexpr (std::is_base_of_v<Owner, Options>) {
      options.*field = value;
    } else {
      setup.*field = value;
    }
  };
}

/// The error for a four-rank plan with these changes; "" if there is none.
std::string plan_error(const std::vector<Change>& changes) {
  Options options = worlds_options(4);
  StrategyOptions setup;
  for (const Change& change : changes) change(options, setup);
  return error_of([&] { pipeline::make_plan(options, setup); });
}

TEST(EngineWorlds, BadOptionsAreSentences) {
  using O = Options;
  using S = StrategyOptions;
  const auto schedule = [](const char* name) {
    return set(&S::schedule, name);
  };
  const auto given = [](const char* flag) {
    return set(&S::given, std::vector<std::string>{flag});
  };
  const Change pipedream = schedule("pipedream");
  const std::pair<const char*, std::vector<Change>> cases[] = {
      {"--schedule 2f2b: give one of", {schedule("2f2b")}},
      {"at most one stage per layer", {set(&O::world_size, 9)}},
      {"--partition even: give uniform", {set(&S::partition, "even")}},
      {"not a regular expression", {set(&S::partition, "type:(")}},
      {"matches 0 layers for 4 stages", {set(&S::partition, "type:conv")}},
      {"2 stages; there are 4", {set(&S::partition, "4,4")}},
      {"has no stash to leave out", {set(&S::stash, false)}},
      {"only --schedule pipedream has it", {set(&S::vertical_sync, true)}},
      {"only --schedule pipedream has stages on several",
       {set(&S::replicas, "2,2")}},
      {"so the norm of the whole gradient is not known",
       {pipedream, set(&O::clip, 1)}},
      {"--world-size 4", {pipedream, set(&S::replicas, "2,1")}},
      {"give 1f1b, zb-h1 or zb-h2",
       {schedule("gpipe"), set(&S::post_validation, true)}},
      {"6 micro-batches cannot be divided over 4 ranks",
       {schedule("interleaved"), set(&O::batch, 6), set(&S::micro_batches, 6)}},
      // Options that the schedule does not read, or the batch cannot satisfy
      {"--chunks: --schedule 1f1b does not read it", {given("--chunks")}},
      {"give it with --schedule zb-auto",
       {schedule("zb-h1"), given("--memory-limit")}},
      {"--micro-batches 8: --schedule pipedream updates after every mini-batch",
       {pipedream, given("--micro-batches")}},
      {"--batch 24: makes 12 micro-batches of 2 samples (rule CEIL), not 16; "
       "give a multiple of 16, or --micro-batches 12",
       {set(&O::batch, 24), set(&S::micro_batches, 16),
        given("--micro-batches")}},
      {"--schedule dualpipe: 7 micro-batches on 4 ranks",
       {schedule("dualpipe"), set(&O::batch, 24), set(&S::micro_batches, 7),
        given("--micro-batches")}},
      {"--steps 5: mini-batches do not divide over --replicas 2,2; give a "
       "multiple of 2",
       {pipedream, set(&O::steps, 5), set(&S::replicas, "2,2")}},
      {"--model resnet18", {set(&O::model, "resnet18")}}};
  for (const auto& [words, changes] : cases) {
    EXPECT_THAT(plan_error(changes), ::testing::HasSubstr(words));
  }
  // A default adapts to the batch, and drawing a schedule needs no layers
  EXPECT_EQ(plan_error({set(&O::batch, 4)}), "");
  EXPECT_EQ(
      plan_error({set(&O::world_size, 16), set(&S::print_schedule, true)}), "");
}

}  // namespace
}  // namespace shardbook::pipeline_test
