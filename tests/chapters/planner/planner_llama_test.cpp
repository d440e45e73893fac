// Plans of the Llama family, against counts from the published sizes.

#include <gtest/gtest.h>

#include <string>

#include "chapters/planner/plan_report.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/errors.h"

namespace shardbook::planner {
namespace {

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
        R"("num_local_experts":4,"num_experts_per_tok":2})",
        R"({"model_type":"deepseek_v3","vocab_size":32000,"hidden_size":512,)"
        R"("num_hidden_layers":4,"num_attention_heads":8,"q_lora_rank":256,)"
        R"("kv_lora_rank":128,"qk_nope_head_dim":64,"qk_rope_head_dim":32,)"
        R"("v_head_dim":64,"intermediate_size":2304,"n_routed_experts":4,)"
        R"("num_experts_per_tok":2,"moe_intermediate_size":256,)"
        R"("n_shared_experts":2,"first_k_dense_replace":1})"));

TEST(PlannerLlama, RefusesWhatTheHybridChapterRefuses) {
  PlanRequest request = request_of("llama-3.1-8b", "dgx-a100", 16, 32, 2048);
  request.limits.tp = 16;
  PlanResult result = search(request);
  EXPECT_TRUE(result.best.empty());
  expect_text(result.illegal["--tp"].example,
              {"--tp 16: 8 heads of keys do not divide by it", "give 8"});
  request.model =
      R"({"model_type":"qwen3_moe","hidden_size":64,"mlp_only_layers":[1]})";
  read_model(request, sim::Cluster::read("dgx-a100"));
  expect_error([&] { search(request); },
               {"has blocks without experts behind blocks with experts"});
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
