// The config that the planner writes: the engine trains the same plan from it.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "chapters/15_engine/strategies.h"
#include "chapters/planner/plan_report.h"
#include "chapters/planner/search.h"
#include "tests/chapters/15_engine/choice_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

Question question_of(const std::string& model, int world_size,
                     std::int64_t batch, DType dtype = DType::kBF16) {
  Question question;
  question.model = model;
  question.world_size = world_size;
  question.batch = batch;
  question.seq = 512;
  question.dtype = dtype;
  read_model(question, sim::Cluster::read("dgx-a100"));
  return question;
}

engine::DeepSpeedConfig written(const Question& question, const Plan& plan) {
  return engine::DeepSpeedConfig::parse(config_of(question, plan), "ds.json");
}

/// What engine_command_of says, and what the file fills.
Options options_under(const Question& question,
                      const engine::DeepSpeedConfig& config) {
  Options options = options_of(question);
  options.chapter = "15_engine";
  options.batch = Options().batch;
  if (dtype_bytes(question.dtype) == 2) options.dtype = DType::kF32;
  engine::apply_config(config, engine::data_parallel_ranks(options, config), {},
                       options);
  return options;
}

/// The chapter that the engine chooses has the plan's degrees and batch.
void expect_same(const Question& question, const Plan& plan) {
  const engine::DeepSpeedConfig config = written(question, plan);
  const Options options = options_under(question, config);
  EXPECT_EQ(options.dtype, question.dtype);
  EXPECT_EQ(options.batch, question.batch);
  const engine::Choice choice = engine::choose(options, config);
  EXPECT_EQ(choice.dp, plan.setup.dp);
  EXPECT_EQ(choice.sizes.train, question.batch);
  EXPECT_EQ(choice.sizes.micro, plan.micro_batch);
  EXPECT_EQ(choice.sizes.accumulation, plan.setup.micro_batches);
  const std::map<std::string, int> degrees = {{"dp", plan.setup.dp},
                                              {"tp", plan.setup.tp},
                                              {"pp", plan.setup.pp},
                                              {"cp", plan.setup.cp}};
  for (const auto& [axis, degree] : degrees) {
    EXPECT_EQ(choice.topology.has_axis(axis) ? choice.topology.size(axis) : 1,
              degree)
        << axis;
  }
  EXPECT_EQ(config.zero.stage, plan.setup.zero_stage);
  EXPECT_EQ(config.zero.offload_optimizer.device == "cpu", plan.offloads);
  EXPECT_EQ(config.zero.offload_param.device == "cpu",
            plan.offloads && plan.setup.zero_stage == 3);
  EXPECT_EQ(config.book.recompute, plan.recompute);
  EXPECT_EQ(config.book.schedule, plan.setup.schedule);
  EXPECT_EQ(config.book.sequence_parallel, plan.setup.sequence_parallel);
  if (plan.setup.schedule == "interleaved") {
    EXPECT_EQ(config.book.chunks, plan.setup.chunks);
  }
}

TEST(PlannerConfig, TheEngineReadsEveryPlan) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const Question question = question_of("gpt2-medium", 8, 16, dtype);
    const std::vector<Plan> plans = plans_of(question);
    ASSERT_GT(plans.size(), 100u);
    // Under sanitizers every tenth
    for (std::size_t i = 0; i < plans.size(); i += kSanitized ? 10 : 1) {
      SCOPED_TRACE(plans[i].layout_text() + ", " + plans[i].work_text());
      expect_same(question, plans[i]);
      if (HasFailure()) return;
    }
  }
}

Plan plan_of(const Question& question, int tp, int pp, int cp, int zero_stage) {
  Plan plan;
  plan.setup.tp = tp;
  plan.setup.pp = pp;
  plan.setup.cp = cp;
  plan.setup.dp = question.world_size / (tp * pp * cp);
  plan.setup.zero_stage = zero_stage;
  if (cp > 1) plan.setup.cp_layout = "zigzag";
  plan.micro_batch = 1;
  plan.setup.micro_batches = question.batch / plan.setup.dp;
  return plan;
}

/// A step of the engine with this config, on shapes.
Report run_config(const Question& question, const Plan& plan) {
  const engine::DeepSpeedConfig config = written(question, plan);
  const Options options = options_under(question, config);
  return engine::train_choice(options, engine::choose(options, config));
}

TEST(PlannerConfig, TheEngineTrainsAsLongAsTheChapter) {
  const Question question = question_of("gpt2-medium", 8, 16);
  std::vector<Plan> plans = {plan_of(question, 2, 2, 1, 1),
                             plan_of(question, 1, 4, 2, 0)};
  plans[0].setup.sequence_parallel = true;
  plans[0].setup.schedule = "interleaved";
  plans[0].setup.chunks = 2;
  plans[0].recompute = "attention";
  plans[1].recompute = "blocks";
  for (const Plan& plan : plans) {
    SCOPED_TRACE(plan.layout_text() + ", " + plan.work_text());
    Prediction prediction = predict_plan(question, plan);
    confirm(question, prediction);
    const Report report = run_config(question, plan);
    EXPECT_DOUBLE_EQ(report.time.step_s, prediction.confirmed_s);
    double bytes = 0;
    for (const RankReport& rank : report.ranks) {
      bytes = std::max(bytes, rank.peak_total.counted);
    }
    EXPECT_DOUBLE_EQ(bytes, prediction.confirmed_bytes);
  }
}

TEST(PlannerConfig, TheAnswerNamesTheEnginesCommand) {
  Question question = question_of("gpt2-medium", 8, 16);
  question.dropout = 0.1;
  const std::string command =
      "./shardbook run engine -- --config ds.json --model gpt2-medium "
      "--world-size 8 --seq 512 --dropout 0.1 --backend nccl --device cuda";
  EXPECT_EQ(engine_command_of(question, "ds.json"), command);
  Answer answer;
  answer.best = {predict_plan(question, plan_of(question, 2, 1, 1, 1))};
  EXPECT_NE(answer_text(question, answer, "ds.json").find(command),
            std::string::npos);
  EXPECT_EQ(answer_text(question, answer).find("run engine"),
            std::string::npos);
  question.dtype = DType::kF32;
  EXPECT_NE(engine_command_of(question, "ds.json").find("--dtype f32"),
            std::string::npos);
}

}  // namespace
}  // namespace shardbook::planner
