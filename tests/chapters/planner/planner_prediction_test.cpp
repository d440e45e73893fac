// The planner's predictions: bytes, and stages and pipelines that it shortens.

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "chapters/common/models/models.h"
#include "chapters/planner/answer.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::planner {
namespace {

PlanRequest gpt_1_3b(std::int64_t batch) {
  return request_of("gpt-1.3b", "dgx-a100", 16, batch, 2048);
}

// Bytes follow closed forms, given on the hybrid chapter's page.
TEST(PlannerPrediction, CountsTheBytesOfThePage) {
  const PlanRequest request = gpt_1_3b(64);
  const double h = 2048, layers = 24, vocabulary = 50257, seq = 2048;
  const double parameters =
      layers * (12 * h * h + 13 * h) + vocabulary * h + seq * h + 2 * h;
  Plan plan = plan_of(request, 1, 1, 1, 0, 2);
  // Two bytes per element; 15/16 of them leave a rank each time
  const double unit = 2 * parameters * 15 / 16;
  const std::map<int, double> units = {{0, 2}, {1, 2}, {2, 3}, {3, 6}};
  for (const auto& [stage, count] : units) {
    plan.setup.zero_stage = stage;
    const Prediction each = predict_plan(request, plan);
    EXPECT_NEAR(each.step.sent_bytes.at("network") / (count * unit), 1, 1e-9)
        << "ZeRO-" << stage;
  }
  // Four sums of [b, s, h] per block, one after the embedding, one before the
  // head; three f32 per token in the loss
  const Prediction cut = predict_plan(request, plan_of(request, 8, 1, 1, 0, 2));
  const double tokens = 2 * seq;
  const double sums = (4 * layers + 2) * tokens * h * 2 + 3 * tokens * 4;
  EXPECT_NEAR(cut.step.sent_bytes.at("nvlink"), 16 * 2 * 7.0 / 8 * sums,
              1e-6 * sums);
}

TEST(PlannerPrediction, ComposedStagesEqualWholeOnes) {
  const sim::Cluster cluster = sim::Cluster::read("dgx-a100");
  const DecoderSizes sizes = {
      .hidden = 2048, .heads = 16, .seq = 1024, .vocabulary = 50304};
  for (const auto recompute :
       {Recompute::kNothing, Recompute::kAttention, Recompute::kBlocks}) {
    for (const int tp : {1, 4}) {
      const StageLayout layout = {.tp = tp,
                                  .cuts_tokens = tp > 1,
                                  .recompute = recompute,
                                  .micro_batch = 4,
                                  .dtype = DType::kBF16,
                                  .splits_backward = true};
      for (const StageParts& parts :
           {StageParts{6, false, false}, StageParts{5, true, false},
            StageParts{5, false, true}, StageParts{4, true, true}}) {
        const StageRun whole = run_stage(cluster, sizes, layout, parts);
        const StageRun made = composed_stage(cluster, sizes, layout, parts);
        EXPECT_EQ(made.parameters, whole.parameters);
        EXPECT_EQ(made.kept_bytes, whole.kept_bytes);
        for (const auto peak :
             {&StageRun::forward_peak, &StageRun::backward_input_peak,
              &StageRun::backward_weight_peak}) {
          EXPECT_EQ((made.*peak).total(), (whole.*peak).total());
        }
        for (const auto peaks :
             {&StageRun::backward_peaks, &StageRun::first_backward_peaks}) {
          for (const auto part : {&BackwardPeaks::head, &BackwardPeaks::blocks,
                                  &BackwardPeaks::embedding}) {
            EXPECT_EQ(((made.*peaks).*part).total(),
                      ((whole.*peaks).*part).total());
          }
        }
        EXPECT_EQ(made.kept_for_weights_bytes, whole.kept_for_weights_bytes);
        EXPECT_EQ(made.input_gradients, whole.input_gradients);
        EXPECT_EQ(made.sent_bytes, whole.sent_bytes);
        // Operations that wait for the host shift by less than one launch
        EXPECT_NEAR(made.busy_s / whole.busy_s, 1, 0.02);
        for (const auto field :
             {&StageRun::forward, &StageRun::backward,
              &StageRun::backward_input, &StageRun::backward_weight}) {
          EXPECT_NEAR((made.*field).s / (whole.*field).s, 1, 0.02);
        }
      }
    }
  }
}

// The head's products hide the host from few blocks, and not from many.
TEST(PlannerPrediction, ManyBlocksShowTheirHost) {
  const sim::Cluster cluster = sim::Cluster::read("dgx-h100");
  const DecoderSizes sizes = {
      .hidden = 768, .heads = 12, .seq = 1024, .vocabulary = 50304};
  const StageLayout layout = {.micro_batch = 2, .dtype = DType::kBF16};
  const StageParts parts = {14, true, true, true};
  const StageRun whole = run_stage(cluster, sizes, layout, parts);
  const StageRun made = composed_stage(cluster, sizes, layout, parts);
  EXPECT_NEAR(made.backward.s / whole.backward.s, 1, 0.02);
  EXPECT_NEAR(made.first_backward.s / whole.first_backward.s, 1, 0.02);
}

// Rings of which only some hops leave the node: the planner runs one rank, whose
// hop does, and the chapter all.
TEST(PlannerPrediction, RingsKeepThePaceOfTheHopThatLeavesTheNode) {
  ModelConfig config = ModelConfig::read("llama-3.2-1b");
  config.n_layer = 4;
  const PlanRequest request =
      request_of(config.to_json(), "dgx-h100", 16, 8, 8192);
  for (const auto& [tp, pp] : {std::pair{2, 1}, {1, 2}, {1, 1}}) {
    const Plan plan = plan_of(request, tp, pp, 16 / tp / pp, 1);
    Prediction each = predict_plan(request, plan);
    confirm(request, each);
    EXPECT_NEAR(each.step.seconds / each.confirmed_s, 1, 0.01)
        << plan.layout_text();
  }
}

// 128 experts share 6,000 choices: ranks have other numbers of rows, and products of
// rows that are no multiple of 8 take longer.
TEST(PlannerPrediction, TheSlowestRankOfUnevenExpertsCounts) {
  ModelConfig config = ModelConfig::read("qwen3-30b-a3b");
  config.n_layer = 4;
  config.llama.has_experts.resize(4);
  const PlanRequest request =
      request_of(config.to_json(), "dgx-h100", 8, 64, 3000);
  for (const int ep : {2, 8}) {
    Plan plan = plan_of(request, 1, 1, 1, 1);
    plan.setup.ep = ep;
    plan.setup.has_own_experts = true;
    Prediction each = predict_plan(request, plan);
    confirm(request, each);
    EXPECT_NEAR(each.step.seconds / each.confirmed_s, 1, 0.02) << ep;
    EXPECT_NEAR(each.memory.total() / each.confirmed_bytes, 1, 0.01) << ep;
  }
}

// A last stage that ends before the first has its sums in the pipeline's time.
TEST(PlannerPrediction, NoPartOfAStepIsNegative) {
  const PlanRequest request = request_of("gpt-nano", "dgx-a100", 2, 4, 128);
  const Prediction each = predict_plan(request, plan_of(request, 1, 2, 1, 0));
  EXPECT_GE(each.step.gradients_s, 0);
  EXPECT_GE(each.step.optimizer_s, 0);
  EXPECT_NEAR(
      each.step.pipeline_s + each.step.gradients_s + each.step.optimizer_s,
      each.step.seconds, 1e-12);
}

TEST(PlannerPrediction, AClusterFileIsConfirmedOnItself) {
  const TempFolder folder;
  const std::string file = folder / "slow.json";
  for (const std::string name : {"", R"("name": "slow",)"}) {
    std::ofstream(file) << "{" << name << R"("extends": "dgx-h100",
        "device": {"extends": "h100-80gb", "sustained": 0.3}})";
    CommandLine line({"plan", "--model", "gpt-1.3b", "--cluster", file,
                      "--nodes", "1", "--batch", "64", "--tp", "8", "--confirm",
                      "--format", "json"});
    const auto plan = nlohmann::json::parse(answer(line, confirm).text);
    const nlohmann::json& best = plan.at("best").at(0);
    EXPECT_EQ(plan.at("cluster"), name.empty() ? file : "slow");
    EXPECT_NEAR(best.at("confirmed").at("step_s").get<double>() /
                    best.at("step_s").get<double>(),
                1, 0.02);
  }
}

// A replay of few micro-batches extrapolates to many.
TEST(PlannerPrediction, LongPipelinesRepeat) {
  PlanRequest request = gpt_1_3b(16);
  for (const std::string schedule : {"1f1b", "interleaved", "zb-h1"}) {
    for (const std::int64_t m : {16, 20, 40}) {
      Plan plan = plan_of(request, 2, 4, 1, 0);
      plan.setup.schedule = schedule;
      plan.setup.micro_batches = m;
      HybridJob job = job_of(request, plan);
      const double shortened = hybrid_step(job).pipeline_s;
      job.composes_stages = false;
      EXPECT_NEAR(shortened / hybrid_step(job).pipeline_s, 1, 5e-3)
          << schedule << ", " << m;
    }
  }
}

}  // namespace
}  // namespace shardbook::planner
