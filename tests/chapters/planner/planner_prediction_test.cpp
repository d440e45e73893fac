// What the planner predicts, against the hybrid chapter's own runs on shapes.

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <string>

#include "chapters/planner/search.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

Question question_of(int world_size, std::int64_t batch) {
  Question question;
  question.model = "gpt-1.3b";
  question.world_size = world_size;
  question.batch = batch;
  question.seq = 2048;
  read_model(question, sim::Cluster::read("dgx-a100"));
  return question;
}

struct Case {
  int tp, pp, cp, zero_stage;
  bool sequence_parallel;
  std::string schedule, recompute;
};

// The predictor leaves out the copies into buckets and single kernels of norms
// and losses, and adds up peaks that do not coincide.
constexpr double kTimeShort = 0.06, kMemoryShort = 0.02, kMemoryOver = 0.08;

TEST(PlannerPrediction, AgreesWithTheHybridChapter) {
  std::vector<Case> cases = {{1, 1, 1, 3, false, "1f1b", "never"},
                             {2, 4, 1, 1, true, "1f1b", "blocks"}};
  if (!kSanitized) {
    cases.insert(cases.end(), {{1, 1, 1, 0, false, "1f1b", "never"},
                               {1, 1, 1, 1, false, "1f1b", "blocks"},
                               {1, 1, 1, 2, false, "1f1b", "attention"},
                               {8, 1, 1, 2, true, "1f1b", "never"},
                               {2, 2, 1, 1, false, "interleaved", "never"},
                               {2, 4, 1, 1, false, "zb-h1", "never"},
                               {1, 8, 1, 1, false, "1f1b", "never"},
                               {2, 2, 2, 1, false, "1f1b", "never"}});
  }
  const Question question = question_of(16, 64);
  for (const Case& each : cases) {
    Plan plan;
    plan.setup.tp = each.tp;
    plan.setup.pp = each.pp;
    plan.setup.cp = each.cp;
    plan.setup.dp = 16 / (each.tp * each.pp * each.cp);
    plan.setup.zero_stage = each.zero_stage;
    plan.setup.sequence_parallel = each.sequence_parallel;
    plan.setup.schedule = each.schedule;
    if (each.cp > 1) plan.setup.cp_layout = "zigzag";
    plan.recompute = each.recompute;
    plan.micro_batch = 2;
    plan.setup.micro_batches = 64 / plan.setup.dp / 2;
    SCOPED_TRACE(plan.layout_text() + ", " + plan.work_text());
    Prediction prediction = predict_plan(question, plan);
    ASSERT_TRUE(can_confirm(question, plan));
    confirm(question, prediction);
    const double time = prediction.step.seconds / prediction.confirmed_s;
    EXPECT_GT(time, 1 - kTimeShort);
    EXPECT_LT(time, 1.02);
    const double memory =
        prediction.memory.total() / prediction.confirmed_bytes;
    EXPECT_GT(memory, 1 - kMemoryShort);
    EXPECT_LT(memory, 1 + kMemoryOver);
  }
}

// Bytes have closed forms: those of the hybrid chapter's page.
TEST(PlannerPrediction, CountsTheBytesOfThePage) {
  const Question question = question_of(16, 64);
  const double h = 2048, layers = 24, vocabulary = 50257, seq = 2048;
  const double parameters =
      layers * (12 * h * h + 13 * h) + vocabulary * h + seq * h + 2 * h;
  Plan plan;
  plan.setup.dp = 16;
  plan.setup.micro_batches = 2;
  plan.micro_batch = 2;
  // Two bytes per element; 15/16 of them leave a rank each time
  const double unit = 2 * parameters * 15 / 16;
  const std::map<int, double> units = {{0, 2}, {1, 2}, {2, 3}, {3, 6}};
  for (const auto& [stage, count] : units) {
    plan.setup.zero_stage = stage;
    const Prediction each = predict_plan(question, plan);
    EXPECT_NEAR(each.step.sent_bytes.at("network") / (count * unit), 1, 1e-9)
        << "ZeRO-" << stage;
  }
  // Four sums of [b, s, h] per block, one behind the embedding, one before the
  // head; three f32 per token in the loss
  plan.setup.zero_stage = 0;
  plan.setup.tp = 8;
  plan.setup.dp = 2;
  plan.setup.micro_batches = 16;
  const Prediction cut = predict_plan(question, plan);
  const double tokens = 2 * seq;
  const double sums = (4 * layers + 2) * tokens * h * 2 + 3 * tokens * 4;
  EXPECT_NEAR(cut.step.sent_bytes.at("nvlink"), 16 * 2 * 7.0 / 8 * sums,
              1e-6 * sums);
}

TEST(PlannerPrediction, ComposedStagesEqualWholeOnes) {
  const sim::Cluster cluster = sim::Cluster::read("dgx-a100");
  planner::DecoderSizes sizes;
  sizes.hidden = 2048;
  sizes.heads = 16;
  sizes.seq = 1024;
  sizes.vocabulary = 50304;
  for (const auto recompute :
       {planner::Recompute::kNothing, planner::Recompute::kAttention,
        planner::Recompute::kBlocks}) {
    for (const int tp : {1, 4}) {
      planner::StageLayout layout;
      layout.tp = tp;
      layout.cuts_tokens = tp > 1;
      layout.recompute = recompute;
      layout.micro_batch = 4;
      layout.dtype = DType::kBF16;
      layout.splits_backward = true;
      for (const planner::StageParts& parts :
           {planner::StageParts{6, false, false},
            planner::StageParts{5, true, false},
            planner::StageParts{5, false, true},
            planner::StageParts{4, true, true}}) {
        const planner::StageRun whole =
            planner::run_stage(cluster, sizes, layout, parts);
        const planner::StageRun made =
            planner::composed_stage(cluster, sizes, layout, parts);
        EXPECT_EQ(made.parameters, whole.parameters);
        EXPECT_EQ(made.kept_bytes, whole.kept_bytes);
        EXPECT_EQ(made.forward_peak_bytes, whole.forward_peak_bytes);
        EXPECT_EQ(made.backward_peak_bytes, whole.backward_peak_bytes);
        EXPECT_EQ(made.kept_for_weights_bytes, whole.kept_for_weights_bytes);
        EXPECT_EQ(made.passing_gradient_bytes, whole.passing_gradient_bytes);
        EXPECT_EQ(made.sent_bytes, whole.sent_bytes);
        // Operations that wait for the host shift by less than one launch
        for (const auto field :
             {&planner::StageRun::forward_s, &planner::StageRun::backward_s,
              &planner::StageRun::both_s, &planner::StageRun::busy_s,
              &planner::StageRun::backward_input_s,
              &planner::StageRun::backward_weight_s}) {
          EXPECT_NEAR(made.*field / (whole.*field), 1, 0.02);
        }
      }
    }
  }
}

// The replay of few micro-batches goes on as that of many.
TEST(PlannerPrediction, LongPipelinesRepeat) {
  Question question = question_of(16, 16);
  for (const std::string schedule : {"1f1b", "interleaved", "zb-h1"}) {
    for (const std::int64_t m : {16, 20, 40}) {
      Plan plan;
      plan.setup.pp = 4;
      plan.setup.tp = 2;
      plan.setup.dp = 2;
      plan.setup.schedule = schedule;
      plan.setup.micro_batches = m;
      planner::HybridJob job = job_of(question, plan);
      const double shortened = planner::hybrid_step(job).pipeline_s;
      job.composes_stages = false;
      EXPECT_NEAR(shortened / planner::hybrid_step(job).pipeline_s, 1, 5e-3)
          << schedule << ", " << m;
    }
  }
}

}  // namespace
}  // namespace shardbook::planner
