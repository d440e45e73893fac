// The planner's search: against predicting every plan, and the rules by which
// plans are left out.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "chapters/planner/plan_report.h"
#include "chapters/planner/search.h"
#include "core/check.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

Question question_of(const std::string& model, const std::string& cluster,
                     int world_size, std::int64_t batch,
                     std::int64_t seq = 512) {
  Question question;
  question.model = model;
  question.world_size = world_size;
  question.batch = batch;
  question.seq = seq;
  read_model(question, sim::Cluster::read(cluster));
  return question;
}

/// Small spaces, in which every plan can be predicted.
std::vector<Question> small_questions() {
  std::vector<Question> questions = {
      question_of("gpt2-medium", "dgx-a100", 4, 16),
      question_of("gpt-1.3b", "kaggle-t4x2", 2, 8)};
  questions.back().dtype = DType::kF16;
  if (kSanitized) return questions;
  questions.push_back(question_of("gpt-1.3b", "dgx-a100", 16, 32, 2048));
  questions.push_back(question_of("gpt-13b", "dgx-v100", 8, 16, 1024));
  questions.back().dtype = DType::kF16;
  return questions;
}

TEST(PlannerSearch, EqualsThePredictionOfEveryPlan) {
  for (const Question& question : small_questions()) {
    SearchOptions every;
    every.prunes = false;
    const Answer fast = search(question), slow = search(question, every);
    ASSERT_EQ(fast.best.size(), slow.best.size()) << question.model;
    for (std::size_t i = 0; i < fast.best.size(); ++i) {
      EXPECT_EQ(fast.best[i].step.seconds, slow.best[i].step.seconds);
    }
    EXPECT_EQ(slow.slower_bound.count, 0);
    EXPECT_EQ(fast.num_plans, slow.num_plans);
    EXPECT_LE(fast.num_predicted, slow.num_predicted);
    // Each plan is counted once
    for (const Answer& answer : {fast, slow}) {
      EXPECT_EQ(answer.num_plans,
                static_cast<std::int64_t>(answer.best.size()) +
                    answer.slower.count + answer.slower_bound.count +
                    answer.does_not_fit.count);
    }
  }
}

// A bound above a prediction would hide a plan.
TEST(PlannerSearch, BoundsAreBelowEveryPrediction) {
  for (const Question& question : small_questions()) {
    for (const Plan& plan : plans_of(question)) {
      const Prediction exact = predict_plan(question, plan);
      const std::string text = plan.layout_text() + ", " + plan.work_text();
      EXPECT_LE(least_seconds(question, plan), exact.step.seconds) << text;
      EXPECT_LE(least_bytes(question, plan), exact.memory.total()) << text;
    }
  }
}

TEST(PlannerSearch, TriesOnlyWhatTheHybridChapterRuns) {
  const Question question = question_of("gpt2-medium", "dgx-a100", 8, 16);
  std::map<std::string, Lost> illegal;
  std::set<int> tps, pps, stages;
  std::set<std::string> schedules, recomputes;
  for (const Plan& plan : plans_of(question, &illegal)) {
    const hybrid::HybridOptions setup = chapter_options(question, plan);
    EXPECT_EQ(hybrid::refusal(options_of(question), setup), "");
    EXPECT_EQ(setup.dp * setup.tp * setup.pp * setup.cp, 8);
    EXPECT_EQ(setup.dp * setup.micro_batches * plan.micro_batch, 16);
    tps.insert(setup.tp);
    pps.insert(setup.pp);
    stages.insert(setup.zero_stage);
    schedules.insert(setup.schedule);
    recomputes.insert(plan.recompute);
  }
  EXPECT_EQ(tps, (std::set<int>{1, 2, 4, 8}));
  EXPECT_EQ(pps, (std::set<int>{1, 2, 4, 8}));
  EXPECT_EQ(stages, (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(schedules, (std::set<std::string>{"1f1b", "interleaved", "zb-h1"}));
  EXPECT_EQ(recomputes,
            (std::set<std::string>{"never", "attention", "blocks"}));
  // ZeRO-2 and -3 with stages
  ASSERT_EQ(illegal.count("--zero-stage"), 1u);
  EXPECT_NE(illegal["--zero-stage"].example.find("m times the traffic"),
            std::string::npos);
}

TEST(PlannerSearch, KeepsToWhatIsFixed) {
  Question question = question_of("gpt2-medium", "dgx-a100", 8, 16);
  question.limits.tp = 2;
  question.limits.zero_stage = 1;
  question.limits.micro_batch = 2;
  question.limits.recompute = "blocks";
  for (const Plan& plan : plans_of(question)) {
    EXPECT_EQ(plan.setup.tp, 2);
    EXPECT_EQ(plan.setup.zero_stage, 1);
    EXPECT_EQ(plan.micro_batch, 2);
    EXPECT_EQ(plan.recompute, "blocks");
  }
  EXPECT_FALSE(plans_of(question).empty());
}

TEST(PlannerSearch, LeavesOutWhatDoesNotFit) {
  // 13 billion parameters on one device: 16 bytes each are 208 GB
  Question question = question_of("gpt-13b", "dgx-a100", 1, 8, 2048);
  question.limits.offloads = false;
  const Answer none = search(question);
  EXPECT_TRUE(none.best.empty());
  EXPECT_EQ(none.does_not_fit.count, none.num_plans);
  // At least the table's 16 bytes: 12 h^2 L + V h parameters
  const double parameters = 12.0 * 5120 * 5120 * 40 + 50257.0 * 5120;
  EXPECT_NEAR(none.least_excess, 16 * parameters - 0.95 * question.capacity(),
              1e9);
  EXPECT_NE(answer_text(question, none).find("No plan fits."),
            std::string::npos);
  // The host holds the optimizer
  question.limits.offloads = true;
  const Answer offloaded = search(question);
  ASSERT_FALSE(offloaded.best.empty());
  for (const Prediction& each : offloaded.best) {
    EXPECT_TRUE(each.plan.offloads);
    EXPECT_LE(each.memory.total(), kUsableMemory * question.capacity());
    EXPECT_NEAR(each.memory.host, parameters * 14, 1e10 + parameters * 2);
  }
  // Less memory never makes a plan faster
  Question tight = question_of("gpt2-medium", "dgx-a100", 4, 16);
  const double free_s = search(tight).best[0].step.seconds;
  tight.memory_bytes = 3e9;
  EXPECT_GE(search(tight).best[0].step.seconds, free_s);
}

TEST(PlannerSearch, QuestionsWithoutSenseAreRefused) {
  const auto refusal = [](const Question& question) -> std::string {
    try {
      search(question);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Question question = question_of("gpt2", "dgx-a100", 4, 16);
  question.world_size = 0;
  EXPECT_NE(refusal(question).find("--world-size 0: dgx-a100 has 1024 devices"),
            std::string::npos);
  question.world_size = 4;
  question.seq = 4096;
  EXPECT_NE(refusal(question).find("--seq 4096: gpt2 has 1024 positions"),
            std::string::npos);
  question.seq = 512;
  question.batch = 0;
  EXPECT_NE(refusal(question).find("--batch 0"), std::string::npos);
  question.batch = std::int64_t{1} << 40;
  EXPECT_NE(refusal(question).find("give the samples of a step, 1 to 1048576"),
            std::string::npos);
  question.batch = 16;
  question.limits.tp = 3;
  EXPECT_NE(refusal(question).find("--tp 3, --pp 1, --cp 1: their product"),
            std::string::npos);
  question.limits.tp = 0;
  question.limits.micro_batch = 3;
  EXPECT_NE(refusal(question).find("--micro-batch 3: does not divide"),
            std::string::npos);
  question.limits.micro_batch = 0;
  question.model = "resnet50";
  EXPECT_NE(refusal(question).find("--model resnet50"), std::string::npos);
  // No degree divides it: every plan is refused, with the reason
  question = question_of("gpt2", "dgx-a100", 4, 3);
  question.limits.tp = question.limits.pp = question.limits.cp = 1;
  const Answer answer = search(question);
  EXPECT_TRUE(answer.best.empty());
  EXPECT_EQ(answer.illegal.count("--batch"), 1u);
}

TEST(PlannerBlocks, AreCutEvenly) {
  using Blocks = std::vector<std::int64_t>;
  EXPECT_EQ(balanced_blocks(40, 4), (Blocks{10, 10, 10, 10}));
  // Embedding and head count as a block: Llama 3
  EXPECT_EQ(balanced_blocks(126, 16),
            (Blocks{7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7}));
  EXPECT_EQ(balanced_blocks(40, 7), (Blocks{5, 6, 6, 6, 6, 6, 5}));
  EXPECT_EQ(balanced_blocks(41, 4), (Blocks{10, 10, 11, 10}));
}

TEST(PlannerReport, NamesTheCommandAndTheConfig) {
  const Question question = question_of("gpt-13b", "dgx-a100", 64, 512, 2048);
  Plan plan;
  plan.setup.tp = 2;
  plan.setup.pp = 4;
  plan.setup.dp = 8;
  plan.setup.zero_stage = 1;
  plan.setup.micro_batches = 32;
  plan.setup.sequence_parallel = true;
  plan.setup.schedule = "interleaved";
  plan.setup.chunks = 2;
  plan.micro_batch = 2;
  plan.recompute = "blocks";
  EXPECT_EQ(plan.layout_text(), "tp 2 x pp 4 x dp 8, SP, ZeRO-1");
  EXPECT_EQ(plan.work_text(), "32 x 2, interleaved 2, recompute blocks");
  EXPECT_EQ(command_of(question, plan, false),
            "./shardbook run hybrid -- --model gpt-13b --dtype bf16 "
            "--world-size 64 --batch 512 --seq 2048 --tp 2 --pp 4 "
            "--partition 6,5,5,5,5,5,5,6 --sequence-parallel --zero-stage 1 "
            "--schedule interleaved --chunks 2 --micro-batches 32 "
            "--recompute blocks --backend nccl --device cuda");
  const auto config = nlohmann::json::parse(config_of(question, plan));
  EXPECT_EQ(config["train_batch_size"], 512);
  EXPECT_EQ(config["train_micro_batch_size_per_gpu"], 2);
  EXPECT_EQ(config["gradient_accumulation_steps"], 32);
  EXPECT_EQ(config["zero_optimization"]["stage"], 1);
  EXPECT_EQ(config["pipeline"]["stages"], 4);
  EXPECT_EQ(config["shardbook"]["tensor_parallel"]["size"], 2);
  EXPECT_EQ(config["shardbook"]["schedule"], "interleaved");
  EXPECT_EQ(config["shardbook"]["chunks"], 2);
  EXPECT_TRUE(config["bf16"]["enabled"].get<bool>());
}

}  // namespace
}  // namespace shardbook::planner
