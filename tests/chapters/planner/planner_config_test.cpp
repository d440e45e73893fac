// The config that the planner writes: the engine trains the same plan from it.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "chapters/15_engine/strategies.h"
#include "chapters/planner/plan.h"
#include "chapters/planner/plan_report.h"
#include "tests/chapters/15_engine/choice_support.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

engine::DeepSpeedConfig written(const PlanRequest& request, const Plan& plan) {
  return engine::DeepSpeedConfig::parse(config_of(request, plan), "ds.json");
}

/// Options of engine_command_of, completed from the file.
Options options_under(const PlanRequest& request,
                      const engine::DeepSpeedConfig& config) {
  Options options = options_of(request);
  options.chapter = "15_engine";
  options.batch = Options().batch;
  if (dtype_bytes(request.dtype()) == 2) options.dtype = DType::kF32;
  engine::apply_config(config, engine::data_parallel_ranks(options, config), {},
                       options);
  return options;
}

/// The chapter that the engine chooses has the plan's degrees and batch.
void expect_same(const PlanRequest& request, const Plan& plan) {
  const engine::DeepSpeedConfig config = written(request, plan);
  const Options options = options_under(request, config);
  EXPECT_EQ(options.dtype, request.dtype());
  EXPECT_EQ(options.batch, request.batch);
  const engine::Choice choice = engine::choose(options, config);
  EXPECT_EQ(choice.dp, plan.setup.dp);
  EXPECT_EQ(choice.sizes.train, request.batch);
  EXPECT_EQ(choice.sizes.micro, plan.micro_batch);
  EXPECT_EQ(choice.sizes.accumulation, plan.setup.micro_batches);
  for (const auto& [axis, degree] :
       {std::pair("dp", plan.setup.dp), std::pair("tp", plan.setup.tp),
        std::pair("pp", plan.setup.pp), std::pair("cp", plan.setup.cp)}) {
    EXPECT_EQ(choice.topology.has_axis(axis) ? choice.topology.size(axis) : 1,
              degree)
        << axis;
  }
  EXPECT_EQ(config.zero.stage, plan.setup.zero_stage);
  EXPECT_EQ(config.zero.offload_optimizer, plan.offloads);
  EXPECT_EQ(config.zero.offload_parameters,
            plan.offloads && plan.setup.zero_stage == 3);
  EXPECT_EQ(config.book.recompute, plan.recompute);
  EXPECT_EQ(config.degrees.schedule, plan.setup.schedule);
  EXPECT_EQ(config.degrees.sequence_parallel, plan.setup.sequence_parallel);
  if (plan.setup.schedule == "interleaved") {
    EXPECT_EQ(config.degrees.chunks, plan.setup.chunks);
  }
}

TEST(PlannerConfig, TheEngineReadsEveryPlan) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const PlanRequest request =
        request_of("gpt2-medium", "dgx-a100", 8, 16, 512, dtype);
    const std::vector<Plan> plans = plans_of(request);
    ASSERT_GT(plans.size(), 100u);
    // Under sanitizers every tenth
    for (std::size_t i = 0; i < plans.size(); i += kSanitized ? 10 : 1) {
      SCOPED_TRACE(plans[i].layout_text() + ", " + plans[i].work_text());
      expect_same(request, plans[i]);
      if (HasFailure()) return;
    }
  }
}

TEST(PlannerConfig, TheEngineTrainsAsLongAsTheChapter) {
  const PlanRequest gpt = request_of("gpt2-medium", "dgx-a100", 8, 16);
  const PlanRequest mixtral = request_of("mixtral-8x7b", "dgx-a100", 8, 16);
  Plan cut = plan_of(gpt, 2, 2, 1, 1), ring = plan_of(gpt, 1, 4, 2, 0);
  Plan spread = plan_of(mixtral, 1, 2, 1, 1);
  spread.setup.ep = 4;
  cut.setup.sequence_parallel = true;
  cut.setup.schedule = "interleaved";
  cut.recompute = "attention";
  ring.recompute = "blocks";
  for (const auto& [request, plan] :
       {std::pair(gpt, cut), {gpt, ring}, {mixtral, spread}}) {
    SCOPED_TRACE(plan.layout_text() + ", " + plan.work_text());
    Prediction prediction = predict_plan(request, plan);
    confirm(request, prediction);
    const engine::DeepSpeedConfig config = written(request, plan);
    const Options options = options_under(request, config);
    const Report report =
        engine::train_choice(options, engine::choose(options, config));
    EXPECT_DOUBLE_EQ(report.time.step_s, prediction.confirmed_s);
    double bytes = 0;
    for (const RankReport& rank : report.ranks) {
      bytes = std::max(bytes, rank.peak_total.counted);
    }
    EXPECT_DOUBLE_EQ(bytes, prediction.confirmed_bytes);
  }
}

TEST(PlannerConfig, TheAnswerNamesTheEnginesCommand) {
  PlanRequest request = request_of("gpt2-medium", "dgx-a100", 8, 16);
  request.base.layout.dropout = 0.1;
  const std::string command =
      "./shardbook run engine -- --config ds.json --model gpt2-medium "
      "--world-size 8 --seq 512 --dropout 0.1 --backend nccl --device cuda";
  EXPECT_EQ(engine_command_of(request, "ds.json"), command);
  PlanResult result;
  result.best = {predict_plan(request, plan_of(request, 2, 1, 1, 1))};
  expect_text(result_text(request, result, "ds.json"), {command});
  EXPECT_FALSE(has_text(result_text(request, result), "run engine"));
  request.base.layout.dtype = DType::kF32;
  expect_text(engine_command_of(request, "ds.json"), {"--dtype f32"});
}

}  // namespace
}  // namespace shardbook::planner
