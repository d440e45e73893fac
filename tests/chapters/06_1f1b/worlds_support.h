#pragma once

// Small runs of the program's strategy, and checks of their results.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/common/run/worlds.h"
#include "tests/chapters/common/sharded_support.h"

namespace shardbook::pipeline_test {

using pipeline::Plan;
using pipeline::StrategyOptions;
using sharded_test::expect_bill;

inline Options worlds_options(int world_size) {
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

inline WorldRun run_strategy(const Options& options,
                             const StrategyOptions& setup) {
  WorldRun run;
  const Plan plan = pipeline::make_plan(options, setup);
  run.report = run_chapter(
      options,
      [&](const Options& in_world, ProcessGroup& world, Report& report) {
        Options here = in_world;
        const bool is_foreseen =
            here.backend == "sim" && options.backend != "sim";
        const Plan mine = is_foreseen ? plan.on_shapes(&here) : plan;
        pipeline::PipelineStrategy strategy(here, setup, mine, world);
        const TrainingLog log =
            train(here, strategy.optimizer(), world.rank() == 0,
                  [&](std::int64_t step) { return strategy.step(step); });
        strategy.finish();
        finish_rank(here, world, log, strategy.bills()[0], report);
        if (here.backend == "sim") return;
        ContextValue<Device> on_host(&RankContext::device,
                                     RankContext::current().host());
        const auto whole = strategy.full_state();
        if (world.rank() == 0) run.parameters = whole;
      },
      each_rank);
  return run;
}

/// Trains on threads; every claim holds. Returns the run and its parity with one
/// device.
inline std::pair<WorldRun, Parity> expect_trained_as_one_device(
    const Options& options, const StrategyOptions& setup) {
  const WorldRun threads = run_strategy(options, setup);
  expect_bill(threads.report);
  EXPECT_NEAR(threads.report.time.simulated_step_s, threads.report.time.step_s,
              1e-9 * threads.report.time.step_s);
  RankContext one(Device::cpu(0), 0, 1);
  one.deterministic = true;
  const RankContext::Scope scope(one);
  const Parity parity =
      compare_runs(options, {threads.report.losses, {}, threads.parameters},
                   pipeline::reference_run(
                       options, setup, pipeline::make_plan(options, setup)));
  EXPECT_TRUE(parity.passed) << parity.max_rel;
  return {threads, parity};
}

struct Variant {
  std::string name;
  int world_size;
  StrategyOptions setup;
};

inline Variant variant(const std::string& schedule, int world_size) {
  Variant result{schedule, world_size, {}};
  result.setup.schedule = schedule;
  result.setup.micro_batches =
      8;  // of 15 samples: 8 pieces, the last one short
  return result;
}

}  // namespace shardbook::pipeline_test
