// DeepSeek-V3 and its like, which are planned and not trained: the rows of the
// block's table against the count, the layers on shapes against the rows.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "chapters/common/models/counted_model.h"
#include "chapters/planner/answer.h"
#include "chapters/planner/on_shapes.h"
#include "chapters/planner/plan_report.h"
#include "chapters/planner/step_parts.h"
#include "tests/chapters/common/llama_support.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/errors.h"

namespace shardbook::planner {
namespace {

constexpr char kSmall[] =
    R"({"model_type":"deepseek_v3","vocab_size":32000,"hidden_size":1024,)"
    R"("num_hidden_layers":6,"num_attention_heads":8,"q_lora_rank":256,)"
    R"("kv_lora_rank":128,"qk_nope_head_dim":64,"qk_rope_head_dim":32,)"
    R"("v_head_dim":48,"intermediate_size":2304,"n_routed_experts":16,)"
    R"("num_experts_per_tok":4,"moe_intermediate_size":256,)"
    R"("n_shared_experts":2,"first_k_dense_replace":2,)"
    R"("max_position_embeddings":4096})";

std::vector<std::string> models() {
  const nlohmann::json released =
      common_test::golden_json("released_models.json").at("models");
  return {released.at("deepseek-v2-lite").at("config").dump(),
          R"({"model_type": "deepseek_v3"})",
          R"({"model_type": "kimi_k2", "num_attention_heads": 64,
              "n_routed_experts": 384, "first_k_dense_replace": 1})",
          R"({"model_type": "glm4_moe"})",
          R"({"model_type": "deepseek_v2", "num_experts_per_tok": 6,
              "q_lora_rank": null, "attention_bias": true, "mlp_bias": true,
              "first_k_dense_replace": 1})",
          kSmall};
}

TEST(PlannedAlone, HasThePartsThatAreCounted) {
  for (const std::string& text : models()) {
    SCOPED_TRACE(text);
    const CountedModel counted = CountedModel::read(text);
    const StandIn stand_in = stand_in_of(text, 2048);
    ASSERT_NE(stand_in.config, nullptr);
    EXPECT_EQ(stand_in.config->type, counted.type);
    const CountedModel planned = CountedModel::of(*stand_in.config);
    EXPECT_EQ(planned.positions, counted.positions);
    EXPECT_EQ(planned.kv_bytes(64, 2, true), counted.kv_bytes(64, 2, true));
    for (const Mask mask : {Mask::kCounted, Mask::kIgnored}) {
      EXPECT_EQ(planned.operations(2048, mask), counted.operations(2048, mask));
    }
    // A deepseek_v2's experts have no biases to go with those of its MLPs
    EXPECT_EQ(planned.parts(), counted.parts());
    EXPECT_EQ(planned.active(), counted.active());
  }
}

TEST(PlannedAlone, WorkOfAStepIsTheCountedOne) {
  for (const std::string& text : models()) {
    SCOPED_TRACE(text);
    const PlanRequest request = request_of(text, "dgx-h100", 8, 64, 2048);
    const CountedModel counted = CountedModel::read(text);
    // Forward and twice as much backward, without a mask
    EXPECT_DOUBLE_EQ(model_flops(job_of(request, plan_of(request, 1, 1, 1, 0))),
                     64 * 2048 * 3 * counted.operations(2048, Mask::kIgnored));
    expect_text(result_text(request, {}),
                {fmt::format("{:.2f} billion", counted.parameters() / 1e9)});
  }
}

// Dense blocks in front, cut over stages that have some and stages that do not
TEST(PlannedAlone, StagesHaveAllParameters) {
  const PlanRequest request = request_of(kSmall, "dgx-h100", 8, 64, 2048);
  const double all = CountedModel::read(kSmall).parameters();
  for (const int pp : {1, 2, 4}) {
    const HybridJob job = job_of(request, plan_of(request, 1, pp, 1, 1));
    const std::vector<StageRun> runs = runs_of(job);
    // Of 1, 2, 2 and 1 blocks; those of the third rank have experts
    if (pp == 4) {
      EXPECT_FALSE(has_stages_of(job, runs, 1, 2));
    }
    double sum = 0, of_sizes = 0;
    for (const StageRun& run : runs) {
      sum += run.parameters;
      const auto add = [&](const std::vector<ParameterSize>& sizes) {
        for (const ParameterSize& each : sizes) of_sizes += each.elements;
      };
      add(run.sizes.embedding);
      add(run.sizes.head);
      for (std::int64_t i = 0; i < run.sizes.blocks; ++i) {
        add(run.sizes.of_block(i));
      }
    }
    EXPECT_EQ(sum, all) << pp;
    EXPECT_EQ(of_sizes, all) << pp;
  }
}

// tp cuts heads and shared experts, ep the experts; norms, routers and the products
// into latent vectors are whole
TEST(PlannedAlone, RanksHoldWhatTheirRowsSay) {
  const PlanRequest request = request_of(kSmall, "dgx-h100", 8, 64, 2048);
  for (const int tp : {1, 2, 4}) {
    Plan plan = plan_of(request, tp, 1, 1, 1);
    plan.setup.sequence_parallel = tp > 1;
    plan.setup.ep = 2;
    const HybridJob job = job_of(request, plan);
    double dense = 0, experts = 0, partial = 0;
    for (const BlockPart& part : block_of_kind(job, /*is_dense=*/false)) {
      if (part.experts > 1) {
        experts += part.parameters() / 2;
      } else {
        dense += part.parameters(tp);
        const bool is_whole = part.cut == Cut::kWhole && tp > 1;
        if (is_whole) partial += part.parameters();
      }
    }
    const StageRun run = run_blocks(job, 1);
    EXPECT_EQ(run.parameters, dense + experts) << tp;
    EXPECT_EQ(run.expert_parameters, experts) << tp;
    // Of own tokens: their gradients are parts of sums over tp
    double found = 0;
    for (const ParameterSize& each : run.sizes.block) {
      if (each.is_partial) found += each.elements;
    }
    EXPECT_EQ(found, partial) << tp;
  }
}

TEST(PlannedAlone, BlocksKeepWhatTheirRowsSay) {
  const PlanRequest request = request_of(kSmall, "dgx-h100", 8, 64, 2048);
  for (const int tp : {1, 2, 4}) {
    Plan plan = plan_of(request, tp, 1, 1, 1, 2);
    plan.setup.sequence_parallel = tp > 1;
    const HybridJob job = job_of(request, plan);
    double each = 0;
    for (const BlockPart& part : block_of_kind(job, true)) {
      each += 2 * part.kept() + 4 * part.statistics();
    }
    const auto kept = [&](std::int64_t blocks) {
      StageParts parts = {blocks};
      parts.dense = blocks;
      return run_stage(job.cluster, job.sizes, job.layout, parts).kept_bytes;
    };
    EXPECT_EQ(kept(3) - kept(2), 2 * 2048 * each / tp) << tp;
  }
}

// Of a token's 8 experts, 4 are on each of two nodes; none is on the other one with
// a chance of 1 in 256
TEST(PlannedAlone, ATokenMayTravelOncePerNode) {
  const PlanRequest request =
      request_of(R"({"model_type": "deepseek_v3"})", "dgx-h100", 16, 64, 4096);
  Plan plan = plan_of(request, 1, 1, 1, 1);
  plan.setup.ep = 16;
  HybridJob job = job_of(request, plan);
  const auto messages = [&] {
    const StageRun run = run_blocks(job, 1);
    return run.forward.s + run.backward.s - run.busy_s;
  };
  const double for_each = messages();
  job.layout.sends_once_per_node = true;
  EXPECT_NEAR(messages() / for_each, 255.0 / 256 / 4, 0.02);
}

// Activations are most of a long sequence's memory, gradients of a short one's
TEST(PlannedAlone, StagesOfBothKindsAreComposed) {
  for (const auto& [seq, recompute] :
       {std::pair(2048, "never"), std::pair(2048, "blocks"),
        std::pair(64, "never")}) {
    SCOPED_TRACE(testing::Message() << seq << " tokens, " << recompute);
    const PlanRequest request = request_of(kSmall, "dgx-h100", 8, 64, seq);
    Plan plan = plan_of(request, 2, 1, 1, 1);
    plan.setup.sequence_parallel = true;
    plan.setup.ep = 2;
    plan.recompute = recompute;
    HybridJob job = job_of(request, plan);
    job.layout.splits_backward = true;
    StageParts parts = {5, true, false};
    parts.dense = 2;
    const StageRun run = run_stage(job.cluster, job.sizes, job.layout, parts);
    const StageRun made =
        composed_stage(job.cluster, job.sizes, job.layout, parts);
    EXPECT_NEAR(made.forward.s / run.forward.s, 1, 1e-3);
    EXPECT_NEAR(made.backward.s / run.backward.s, 1, 1e-3);
    EXPECT_EQ(made.parameters, run.parameters);
    EXPECT_EQ(made.expert_parameters, run.expert_parameters);
    EXPECT_EQ(made.kept_bytes, run.kept_bytes);
    EXPECT_EQ(made.sizes.dense_block.size(), run.sizes.dense_block.size());
    EXPECT_NEAR(made.first_backward_peaks.blocks.total() /
                    run.first_backward_peaks.blocks.total(),
                1, 0.02);
    EXPECT_NEAR(
        made.backward_input_peak.total() / run.backward_input_peak.total(), 1,
        0.02);
    for (const auto& [link, bytes] : run.sent_bytes) {
      EXPECT_DOUBLE_EQ(made.sent_bytes.at(link), bytes) << link;
    }
  }
}

TEST(PlannedAlone, ThePlanSaysThatNothingTrainsIt) {
  const std::vector<std::string> words = {
      "plan", "--model", kSmall, "--world-size", "8", "--batch",
      "16",   "--seq",   "1024", "--tp",         "2", "--pp",
      "2",    "--ep",    "2",    "--explain"};
  CommandLine line(words);
  const std::string text = answer(line, confirm).text;
  expect_text(text, {"the book does not train a deepseek_v3",
                     "it is planned with all its parts", "EP 2, SP",
                     "parameters of experts"});
  EXPECT_FALSE(has_text(text, "shardbook run"));
}

TEST(PlannedAlone, TheHybridChapterConfirmsThePlan) {
  PlanRequest request = request_of(kSmall, "dgx-h100", 8, 32, 1024);
  for (const int pp : {1, 2}) {
    Plan plan = plan_of(request, 2, pp, 1, 1);
    plan.setup.sequence_parallel = true;
    plan.setup.ep = 2;
    Prediction prediction = predict_plan(request, plan);
    confirm(request, prediction);
    EXPECT_NEAR(prediction.step.seconds / prediction.confirmed_s, 1, 0.06)
        << pp;
    EXPECT_NEAR(prediction.memory.total() / prediction.confirmed_bytes, 1, 0.05)
        << pp;
    double memory = 0;
    for (const ExplainedPart& each : explain(request, prediction).memory) {
      memory += each.value;
    }
    EXPECT_DOUBLE_EQ(memory, prediction.memory.total());
  }
}

TEST(PlannedAlone, RefusalsNameWhatIsNotPlanned) {
  PlanRequest request = request_of(kSmall, "dgx-h100", 8, 32, 4096);
  request.limits.cp = 2;
  PlanResult result = search(request);
  EXPECT_TRUE(result.best.empty());
  expect_text(result.illegal["--cp"].example,
              {"--cp 2", "latent attention", "give 1"});
  request.limits.cp = 1;
  request.limits.zero_stage = 2;
  result = search(request);
  expect_text(result.illegal["--zero-stage"].example, {"--zero-stage 2"});
  // No program trains it
  expect_error([] { ModelConfig::read(kSmall); }, {"deepseek_v3"});
}

// Dense blocks take less time than those with experts, also in a bound.
TEST(PlannedAlone, BoundsCountDenseBlocks) {
  const std::string text =
      R"({"model_type":"deepseek_v3","vocab_size":4096,"hidden_size":2048,)"
      R"("num_hidden_layers":4,"num_attention_heads":16,)"
      R"("num_key_value_heads":16,"intermediate_size":1024,)"
      R"("kv_lora_rank":256,"q_lora_rank":512,"qk_nope_head_dim":64,)"
      R"("qk_rope_head_dim":32,"v_head_dim":64,"n_routed_experts":16,)"
      R"("num_experts_per_tok":4,"moe_intermediate_size":1024,)"
      R"("n_shared_experts":1,"first_k_dense_replace":3,)"
      R"("max_position_embeddings":4096})";
  const PlanRequest request = request_of(text, "dgx-h100", 2, 8, 1024);
  SearchOptions all;
  all.prunes = false;
  const PlanResult pruned = search(request), found = search(request, all);
  ASSERT_EQ(pruned.best.size(), found.best.size());
  for (std::size_t i = 0; i < found.best.size(); ++i) {
    EXPECT_EQ(pruned.best[i].step.seconds, found.best[i].step.seconds);
  }
  EXPECT_LT(pruned.num_predicted, found.num_predicted);
}

// Runs on shapes are remembered by the model's object.
TEST(PlannedAlone, EqualModelsAreOneObject) {
  const auto model_of = [](const std::string& text) {
    return request_of(text, "dgx-h100", 8, 64, 2048).base.sizes.model;
  };
  std::set<std::shared_ptr<const ModelConfig>> different;
  nlohmann::json file = nlohmann::json::parse(kSmall);
  for (const std::string key :
       {"", "vocab_size", "hidden_size", "kv_lora_rank", "qk_rope_head_dim",
        "v_head_dim", "moe_intermediate_size", "n_shared_experts",
        "first_k_dense_replace"}) {
    if (!key.empty()) file[key] = 2 * file.at(key).get<int>();
    EXPECT_EQ(model_of(file.dump()), model_of(file.dump()));
    EXPECT_TRUE(different.insert(model_of(file.dump())).second) << key;
  }
}

// Without blocks that have experts, none need ranks of their own.
TEST(PlannedAlone, DenseBlocksAloneHaveNoExperts) {
  nlohmann::json file = nlohmann::json::parse(kSmall);
  file["first_k_dense_replace"] = file.at("num_hidden_layers");
  const StandIn stand_in = stand_in_of(file.dump(), 2048);
  ASSERT_NE(stand_in.config, nullptr);
  EXPECT_EQ(stand_in.config->llama.num_experts, 0);
  EXPECT_EQ(CountedModel::of(*stand_in.config).parts(),
            CountedModel::read(file.dump()).parts());
}

}  // namespace
}  // namespace shardbook::planner
