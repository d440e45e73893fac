// One program, four worlds: what schedules count with data is what the world
// `sim` charges on shapes, and what the bills say.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "chapters/06_1f1b/trainer.h"
#include "chapters/common/worlds.h"
#include "core/check.h"
#include "tests/support/temp_folder.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Plan;
using pipeline::TrainerOptions;

Options worlds_options(int world_size) {
  Options options;
  options.chapter = "06_1f1b";
  options.world_size = world_size;
  options.model = R"({"n_layer": 6, "n_embd": 16, "n_head": 2,
                      "n_positions": 16, "vocab_size": 64})";
  options.data = "random";
  options.steps = 4;
  options.batch = 15;
  options.seq = 8;
  options.deterministic = true;
  return options;
}

struct WorldRun {
  Report report;
  std::vector<NamedTensor> parameters;
};

WorldRun run(const Options& options, const TrainerOptions& how) {
  WorldRun run;
  const Plan plan = pipeline::make_plan(options, how);
  run.report = run_chapter(
      options,
      [&](const Options& as, ProcessGroup& world, Report& report) {
        Options here = as;
        if (plan.is_asynchronous()) here.steps = options.steps;
        pipeline::Trainer trainer(here, how, plan, world);
        const TrainingLog log =
            train(here, trainer.optimizer(), false,
                  [&](std::int64_t step) { return trainer.step(step); });
        trainer.finish();
        finish_rank(here, world, log, trainer.predicted_bytes(), trainer.bill(),
                    report);
        if (as.backend == "sim") return;
        ContextValue<Device> on_host(&RankContext::device,
                                     RankContext::current().host());
        const auto whole = trainer.full_parameters();
        if (world.rank() == 0) run.parameters = whole;
      },
      [](int rank) { return rank; });
  return run;
}

void expect_claims(const Report& report) {
  for (const RankReport& rank : report.ranks) {
    EXPECT_DOUBLE_EQ(rank.bytes.predicted, rank.bytes.counted);
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      const Claim& peak = rank.peak[static_cast<std::size_t>(k)];
      if (peak.predicted < 0) continue;
      EXPECT_EQ(peak.predicted, peak.counted)
          << memory_kind_name(static_cast<MemoryKind>(k));
    }
  }
}

struct Variant {
  std::string name;
  int world_size;
  TrainerOptions how;
};

Variant variant(const std::string& schedule, int world_size) {
  Variant result{schedule, world_size, {}};
  result.how.schedule = schedule;
  result.how.micro_batches = 8;  // of 15 samples: 8 pieces, the last one short
  return result;
}

std::vector<Variant> variants() {
  std::vector<Variant> all = {
      variant("naive", 2),        variant("gpipe", 4),
      variant("1f1b", 1),         variant("1f1b", 2),
      variant("1f1b", 3),         variant("1f1b", 8),
      variant("1f1b-clocked", 4), variant("interleaved", 2),
      variant("interleaved", 4),  variant("interleaved-grouped", 2),
      variant("zb-h1", 4),        variant("zb-h2", 3),
      variant("dualpipe", 2),     variant("dualpipe", 4),
      variant("pipedream", 4),    variant("pipedream", 3),
      variant("pipedream", 3),    variant("pipedream-2bw", 4)};
  all[9].how.group = 3;
  all[15].how.vertical_sync = true;
  all[16].how.replicas = "2,1";
  all.push_back(variant("zb-h2", 4));
  all.back().how.post_validation = true;
  return all;
}

// All four claims, for every schedule.
TEST(EngineWorlds, SchedulesCountOnThreadsWhatSimCharges) {
  for (const Variant& each : variants()) {
    SCOPED_TRACE(each.name + " on " + std::to_string(each.world_size));
    Options options = worlds_options(each.world_size);
    const Plan plan = pipeline::make_plan(options, each.how);
    options.backend = "threads";
    const WorldRun threads = run(options, each.how);
    expect_claims(threads.report);
    EXPECT_NEAR(threads.report.time.predicted_step_s,
                threads.report.time.step_s, 1e-9 * threads.report.time.step_s);
    RankContext one(Device::cpu(0), 0, 1);
    one.deterministic = true;
    const RankContext::Scope scope(one);
    const Parity parity = compare_with_one_device(
        options, threads.report.losses, threads.parameters,
        pipeline::reference_run(options, each.how, plan));
    EXPECT_TRUE(parity.passed) << parity.max_rel;
    if (plan.is_asynchronous()) {
      // Sums over the micro-batches of a loss are rounded in another place
      EXPECT_LE(parity.max_abs, 1e-6);
    }

    options.backend = "sim";
    const WorldRun shapes = run(options, each.how);
    expect_claims(shapes.report);
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

TEST(EngineWorlds, PlacesOfTheBubbleAreTheFormulas) {
  // Larger stages, so that the launch of operations does not count
  Options options = worlds_options(4);
  options.model = R"({"n_layer": 8, "n_embd": 2048, "n_head": 16,
                      "n_positions": 1024, "vocab_size": 64})";
  options.backend = "sim";
  options.batch = 16;
  options.seq = 1024;
  const auto idle = [&](const std::string& schedule) {
    TrainerOptions how;
    how.schedule = schedule;
    how.micro_batches = 16;
    how.partition = "type:block";
    return run(options, how).report.time;
  };
  const auto one = idle("1f1b"), gpipe = idle("gpipe");
  const auto zero = idle("zb-h1");
  // (p-1)/(m+p-1) = 3/19 of the time; the optimizer's is work too
  EXPECT_NEAR(one.idle_share, 3.0 / 19, 0.04);
  EXPECT_NEAR(gpipe.idle_share, one.idle_share, 0.02);
  EXPECT_LT(zero.idle_share, one.idle_share - 0.03);
  EXPECT_LT(zero.step_s, one.step_s);
}

// ZB-H2 has no bubble, unless ranks wait for each other before they step.
TEST(EngineWorlds, PostValidationTakesTheWaitAway) {
  Options options = worlds_options(3);
  options.model = R"({"model_type": "mlp", "n_embd": 4096,
                      "vocab_size": 18432, "n_positions": 1024})";
  options.backend = "sim";
  options.optimizer = "sgd";
  options.dtype = DType::kBF16;
  options.batch = 36;
  options.seq = 1024;
  options.steps = 3;
  TrainerOptions how;
  how.schedule = "zb-h2";
  how.micro_batches = 12;
  how.partition = "2,1,1";
  const VirtualTime before = run(options, how).report.time;
  how.post_validation = true;
  const VirtualTime after = run(options, how).report.time;
  EXPECT_LT(after.step_s, 0.97 * before.step_s);
  EXPECT_LT(after.idle_share, before.idle_share - 0.03);
}

TEST(EngineWorlds, AUsersOwnScheduleRuns) {
  const TempFolder folder;
  const std::string file = folder / "mine.json";
  std::ofstream(file) << R"({"name": "mine", "micro_batches": 2,
                             "ranks": ["F0 F1 B0 B1", "F0 F1 B0 B1"]})";
  Options options = worlds_options(2);
  options.batch = 4;
  TrainerOptions how;
  how.schedule = file;
  const Plan plan = pipeline::make_plan(options, how);
  EXPECT_EQ(plan.schedule.name, "mine");
  EXPECT_EQ(plan.pieces.size(), 2u);
  const WorldRun threads = run(options, how);
  expect_claims(threads.report);
  RankContext one(Device::cpu(0), 0, 1);
  one.deterministic = true;
  const RankContext::Scope scope(one);
  EXPECT_TRUE(compare_with_one_device(
                  options, threads.report.losses, threads.parameters,
                  pipeline::reference_run(options, how, plan))
                  .passed);
}

TEST(EngineWorlds, BadOptionsAreSentences) {
  const auto error =
      [](const std::function<void(Options&, TrainerOptions&)>& change) {
        Options options = worlds_options(4);
        TrainerOptions how;
        change(options, how);
        try {
          pipeline::make_plan(options, how);
        } catch (const Error& error) {
          return std::string(error.what());
        }
        return std::string();
      };
  using ::testing::HasSubstr;
  EXPECT_THAT(error([](auto&, auto& how) { how.schedule = "2f2b"; }),
              HasSubstr("--schedule 2f2b: give one of"));
  EXPECT_THAT(error([](auto& o, auto&) { o.world_size = 9; }),
              HasSubstr("at most one stage per layer"));
  EXPECT_THAT(error([](auto&, auto& how) { how.partition = "even"; }),
              HasSubstr("--partition even: give uniform"));
  EXPECT_THAT(error([](auto&, auto& how) { how.partition = "type:("; }),
              HasSubstr("is no regular expression"));
  EXPECT_THAT(error([](auto&, auto& how) { how.partition = "type:conv"; }),
              HasSubstr("matches 0 layers for 4 stages"));
  EXPECT_THAT(error([](auto&, auto& how) { how.partition = "4,4"; }),
              HasSubstr("2 stages; the schedule has 4"));
  EXPECT_THAT(error([](auto&, auto& how) { how.stash = false; }),
              HasSubstr("has no stash to leave out"));
  EXPECT_THAT(error([](auto&, auto& how) { how.vertical_sync = true; }),
              HasSubstr("only --schedule pipedream has it"));
  EXPECT_THAT(error([](auto&, auto& how) { how.replicas = "2,2"; }),
              HasSubstr("only --schedule pipedream has stages on several"));
  EXPECT_THAT(error([](auto& o, auto& how) {
                how.schedule = "pipedream";
                o.clip = 1;
              }),
              HasSubstr("nobody knows the norm of the whole"));
  EXPECT_THAT(error([](auto&, auto& how) {
                how.schedule = "pipedream";
                how.replicas = "2,1";
              }),
              HasSubstr("--world-size 4"));
  EXPECT_THAT(error([](auto&, auto& how) {
                how.schedule = "gpipe";
                how.post_validation = true;
              }),
              HasSubstr("give 1f1b, zb-h1 or zb-h2"));
  EXPECT_THAT(error([](auto& o, auto& how) {
                how.schedule = "interleaved";
                o.batch = how.micro_batches = 6;
              }),
              HasSubstr("6 micro-batches do not divide over 4 ranks"));
  EXPECT_THAT(error([](auto& o, auto&) { o.model = "resnet18"; }),
              HasSubstr("--model resnet18"));
}

TEST(EngineWorlds, Partitions) {
  const auto layers = layers_of(model_config(worlds_options(1)));  // e b*6 h
  using ::testing::ElementsAre;
  EXPECT_THAT(pipeline::cuts_of("uniform", *layers, 4),
              ElementsAre(0, 2, 4, 6, 8));
  EXPECT_THAT(pipeline::cuts_of("3,2,3", *layers, 3), ElementsAre(0, 3, 5, 8));
  // Two blocks in each stage
  const auto cuts = pipeline::cuts_of("type:GPTBLOCK", *layers, 3);
  for (std::size_t s = 0; s < 3; ++s) {
    int blocks = 0;
    for (int i = cuts[s]; i < cuts[s + 1]; ++i) blocks += i > 0 && i < 7;
    EXPECT_EQ(blocks, 2);
  }
}

}  // namespace
}  // namespace shardbook::pipeline_test
