// Plans of the Llama family: against the hybrid chapter's own runs on shapes, and
// against counts from the published sizes.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/planner/confirm.h"
#include "chapters/planner/plan_report.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

struct LlamaCase {
  std::string model;
  int tp, pp, cp, zero_stage;
  bool sequence_parallel = false;
  std::string schedule = "1f1b", recompute = "never";
  int ep = 1;
};

Plan llama_plan(const PlanRequest& request, const LlamaCase& each) {
  Plan plan = plan_of(request, each.tp, each.pp, each.cp, each.zero_stage, 2);
  plan.setup.sequence_parallel = each.sequence_parallel;
  plan.setup.ep = each.ep;
  plan.setup.schedule = each.schedule;
  plan.recompute = each.recompute;
  return plan;
}

// Untied tables of their own for embedding and head (llama-3.1), and one for both
// (llama-3.2-1b, qwen3-0.6b).
TEST(PlannerLlama, AgreesWithTheHybridChapter) {
  std::vector<LlamaCase> cases = {
      {"llama-nano", 1, 1, 1, 0},
      {"llama-3.1-8b", 2, 4, 1, 1, true, "1f1b", "blocks"}};
  if (!kSanitized) {
    cases.insert(
        cases.end(),
        {{"llama-3.1-8b", 1, 1, 1, 0},
         {"llama-3.1-8b", 8, 1, 1, 2, true},
         {"llama-3.1-8b", 2, 2, 1, 1, false, "interleaved"},
         {"llama-3.1-8b", 2, 4, 1, 1, false, "zb-h1"},
         {"llama-3.1-8b", 1, 8, 1, 1},
         {"llama-3.1-8b", 2, 2, 2, 1, true, "1f1b", "attention"},
         {"llama-3.1-70b", 8, 1, 1, 0},
         {"llama-3.1-70b", 8, 2, 1, 1, true, "1f1b", "blocks"},
         {"llama-3.1-70b", 2, 2, 2, 1},
         {"llama-3.2-1b", 8, 1, 1, 0},
         {"llama-3.2-1b", 2, 4, 1, 1, false, "zb-h1"},
         {"qwen3-0.6b", 2, 2, 2, 1},
         {"mixtral-8x7b", 1, 1, 1, 1, false, "1f1b", "never", 8},
         {"mixtral-8x7b", 1, 4, 1, 0, false, "interleaved", "attention", 4},
         {"mixtral-8x7b", 2, 4, 1, 1, true, "1f1b", "blocks", 2},
         {"qwen3-30b-a3b", 1, 2, 1, 1, false, "1f1b", "never", 8},
         {"qwen3-30b-a3b", 2, 2, 1, 1, true, "1f1b", "never", 4}});
  }
  constexpr double kTime = 0.06, kMemory = 0.02;
  for (const LlamaCase& each : cases) {
    const bool is_small = each.model == "llama-nano";
    const PlanRequest request =
        request_of(each.model, is_small ? "textbook" : "dgx-a100",
                   is_small ? 2 : 16, 64, is_small ? 64 : 2048);
    const Plan plan = llama_plan(request, each);
    SCOPED_TRACE(each.model + ": " + plan.layout_text() + ", " +
                 plan.work_text());
    Prediction prediction = predict_plan(request, plan);
    ASSERT_TRUE(can_confirm(request, plan));
    confirm(request, prediction);
    // A small model's step is mostly latencies of the update, which are left out
    if (!is_small) {
      EXPECT_NEAR(prediction.step.seconds / prediction.confirmed_s, 1, kTime);
    }
    EXPECT_NEAR(prediction.memory.total() / prediction.confirmed_bytes, 1,
                kMemory);
  }
}

// ZeRO's peaks are sums of some that do not coincide, as those of GPTs.
TEST(PlannerLlama, AgreesWithZero) {
  if (kSanitized) GTEST_SKIP() << "long on shapes";
  constexpr double kTime = 0.06, kMemoryShort = 0.02, kMemoryOver = 0.03;
  const PlanRequest request =
      request_of("llama-3.1-8b", "dgx-a100", 16, 64, 2048);
  for (const LlamaCase& each :
       std::vector<LlamaCase>{{"", 1, 1, 1, 2},
                              {"", 8, 1, 1, 2, true},
                              {"", 1, 1, 1, 3},
                              {"", 1, 1, 1, 3, false, "1f1b", "blocks"}}) {
    const Plan plan = llama_plan(request, each);
    SCOPED_TRACE(plan.layout_text() + ", " + plan.work_text());
    Prediction prediction = predict_plan(request, plan);
    confirm(request, prediction);
    EXPECT_NEAR(prediction.step.seconds / prediction.confirmed_s, 1, kTime);
    const double memory =
        prediction.memory.total() / prediction.confirmed_bytes;
    EXPECT_GT(memory, 1 - kMemoryShort);
    EXPECT_LT(memory, 1 + kMemoryOver);
  }
}

// Llama 3.1 8B from its published sizes: h 4096, 32 blocks, 8 heads of keys among
// 32, f 14336, two tables of 128256 rows.
TEST(PlannerLlama, CountsTwoTablesAndFewHeadsOfKeys) {
  const PlanRequest request =
      request_of("llama-3.1-8b", "dgx-a100", 8, 64, 2048);
  const double h = 4096, f = 14336, table = 128256 * h;
  const double weights = h * (h + 2 * h / 4 + h) + 3 * h * f;
  Plan plan = plan_of(request, 1, 1, 1, 0);
  const HybridJob job = job_of(request, plan);
  EXPECT_EQ(weight_products(job), weights);
  EXPECT_EQ(attention_products(job), 2 * 2048 * h);
  EXPECT_FALSE(job.is_tied);
  // 2 bytes each of parameters and gradients, 12 of the optimizer's state
  const double parameters = 32 * (weights + 2 * h) + h + 2 * table;
  const StepMemory memory = step_memory(job);
  EXPECT_EQ(memory.parameters, 2 * parameters);
  EXPECT_EQ(memory.optimizer, 12 * parameters);
  // Norms are left out of the bound, tables are not
  plan.recompute = "blocks";
  EXPECT_DOUBLE_EQ(least_bytes(request, plan), 16 * (32 * weights + 2 * table));
  expect_text(result_text(request, {}), {"8.03 billion parameters"});
  // Each end of a pipeline has one of them
  plan = plan_of(request, 1, 2, 1, 0);
  EXPECT_EQ(step_memory(job_of(request, plan)).parameters,
            2 * (16 * (weights + 2 * h) + table));
  // One table for both: Llama 3.2 1B
  const PlanRequest tied = request_of("llama-3.2-1b", "dgx-a100", 8, 64, 2048);
  EXPECT_TRUE(job_of(tied, plan).is_tied);
  expect_text(result_text(tied, {}), {"1.24 billion parameters"});
}

// Mixtral 8x7B: h 4096, 8 heads of keys among 32, 8 experts of f 14336, of which a
// token visits 2.
TEST(PlannerLlama, CountsExpertsOnTheRanksThatHaveThem) {
  const PlanRequest request =
      request_of("mixtral-8x7b", "dgx-a100", 16, 64, 2048);
  const double h = 4096, f = 14336, table = 32000 * h;
  const double attention = h * (h + 2 * h / 4 + h), router = 8 * h;
  Plan plan = plan_of(request, 2, 2, 1, 1);
  plan.setup.sequence_parallel = true;
  plan.setup.ep = 4;
  EXPECT_EQ(plan.layout_text(), "tp 2 x pp 2 x dp 4, EP 4, SP, ZeRO-1");
  const HybridJob job = job_of(request, plan);
  EXPECT_EQ(weight_products(job), attention + router + 2 * 3 * h * f);
  // tp cuts attention and tables, ep the experts
  const double dense = 16 * (attention / 2 + router + 2 * h) + table / 2;
  const double experts = 16 * 2 * 3 * h * f;
  const StepMemory memory = step_memory(job);
  EXPECT_EQ(memory.parameters, 2 * (dense + experts));
  // Four replicas share the dense state, two ranks of tp have the same experts
  EXPECT_DOUBLE_EQ(memory.optimizer, 12 * (dense / 4 + experts / 2));
  expect_text(result_text(request, {}), {"46.70 billion parameters"});
}

class PlannerBounds : public testing::TestWithParam<const char*> {};

TEST_P(PlannerBounds, AreBelowEveryPrediction) {
  const PlanRequest request = request_of(GetParam(), "dgx-a100", 4, 16, 2048);
  SearchOptions every;
  every.prunes = false;
  const PlanResult fast = search(request), slow = search(request, every);
  ASSERT_EQ(fast.best.size(), slow.best.size());
  for (std::size_t i = 0; i < fast.best.size(); ++i) {
    EXPECT_EQ(fast.best[i].step.seconds, slow.best[i].step.seconds);
  }
  for (const Plan& plan : plans_of(request)) {
    const Prediction exact = predict_plan(request, plan);
    const std::string text = plan.layout_text() + ", " + plan.work_text();
    EXPECT_LE(least_seconds(request, plan), exact.step.seconds) << text;
    EXPECT_LE(least_bytes(request, plan), exact.memory.total()) << text;
    const HybridJob job = job_of(request, plan);
    const double limited = hybrid_step(job, 0).seconds;
    EXPECT_LE(limited, exact.step.seconds) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PlannerBounds,
    testing::Values(
        "llama-3.2-1b",
        R"({"model_type":"mixtral","vocab_size":32000,"hidden_size":1024,)"
        R"("intermediate_size":3584,"num_hidden_layers":4,)"
        R"("num_attention_heads":16,"num_key_value_heads":4,)"
        R"("num_local_experts":4,"num_experts_per_tok":2})"));

TEST(PlannerLlama, RefusesWhatTheHybridChapterRefuses) {
  PlanRequest request = request_of("llama-3.1-8b", "dgx-a100", 16, 32, 2048);
  request.limits.tp = 16;
  PlanResult result = search(request);
  EXPECT_TRUE(result.best.empty());
  expect_text(result.illegal["--tp"].example,
              {"--tp 16: 8 heads of keys do not divide by it", "give 8"});
  request.model =
      R"({"model_type":"qwen3_moe","hidden_size":64,"mlp_only_layers":[0]})";
  expect_error([&] { search(request); },
               {"has blocks with experts and blocks without"});
  request.model = "mixtral-8x7b";
  read_model(request, sim::Cluster::read("dgx-a100"));
  request.limits.tp = 1;
  request.limits.ep = 3;
  expect_error([&] { search(request); }, {"--ep 3: does not divide the 8"});
  request.limits.ep = 8, request.limits.pp = 4;
  expect_error([&] { search(request); }, {"--ep 8: their product"});
  request.limits.ep = 2, request.limits.pp = 0;
  request.model = "llama-3.1-8b";
  read_model(request, sim::Cluster::read("dgx-a100"));
  expect_error([&] { search(request); },
               {"--ep 2: llama-3.1-8b has no experts"});
  request.limits = {};
  // Attention would see more tokens than its window has
  request.model = "mistral-7b";
  request.base.sizes.seq = 8192;
  expect_error([&] { search(request); }, {"sliding_window is 4096"});
}

}  // namespace
}  // namespace shardbook::planner
