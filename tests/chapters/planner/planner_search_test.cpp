// The planner's search: against predicting every plan, and the rules that
// exclude plans.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "chapters/planner/plan_report.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"
#include "tests/support/widths.h"

namespace shardbook::planner {
namespace {

/// Small spaces, in which every plan can be predicted.
std::vector<PlanRequest> small_requests() {
  std::vector<PlanRequest> requests = {
      request_of("gpt2-medium", "dgx-a100", 4, 16),
      request_of("gpt-1.3b", "kaggle-t4x2", 2, 8, 512, DType::kF16)};
  if (kSanitized) return requests;
  requests.push_back(request_of("gpt-1.3b", "dgx-a100", 16, 32, 2048));
  requests.push_back(
      request_of("gpt-13b", "dgx-v100", 8, 16, 1024, DType::kF16));
  return requests;
}

TEST(PlannerSearch, EqualsThePredictionOfEveryPlan) {
  for (const PlanRequest& request : small_requests()) {
    SearchOptions every;
    every.prunes = false;
    const PlanResult fast = search(request), slow = search(request, every);
    ASSERT_EQ(fast.best.size(), slow.best.size()) << request.model;
    for (std::size_t i = 0; i < fast.best.size(); ++i) {
      EXPECT_EQ(fast.best[i].step.seconds, slow.best[i].step.seconds);
    }
    EXPECT_EQ(slow.slower_bound.count, 0);
    EXPECT_EQ(fast.num_plans, slow.num_plans);
    EXPECT_LE(fast.num_predicted, slow.num_predicted);
    // Each plan is counted once
    for (const PlanResult& result : {fast, slow}) {
      EXPECT_EQ(result.num_plans,
                static_cast<std::int64_t>(result.best.size()) +
                    result.slower.count + result.slower_bound.count +
                    result.does_not_fit.count);
    }
  }
}

TEST(PlannerSearch, SettlesEveryPlanAsAPoint) {
  for (const PlanRequest& request : small_requests()) {
    std::vector<std::int64_t> calls;
    SearchOptions setup;
    setup.keeps_points = true;
    setup.progress = [&](std::int64_t done, std::int64_t all) {
      calls.push_back(all - done);
    };
    const PlanResult result = search(request, setup);
    EXPECT_EQ(calls.back(), 0);
    EXPECT_TRUE(std::is_sorted(calls.rbegin(), calls.rend()));
    std::map<Point::Outcome, std::int64_t> count;
    for (const Point& each : result.points) {
      ++count[each.outcome];
      const Prediction exact = predict_plan(request, each.plan);
      const double seconds = exact.step.seconds, bytes = exact.memory.total();
      const std::string text = each.plan.layout_text();
      if (each.outcome == Point::kPredicted) {
        EXPECT_EQ(each.seconds, seconds) << text;
        EXPECT_EQ(each.bytes, bytes) << text;
      } else {
        EXPECT_LE(each.seconds, seconds) << text;
        EXPECT_LE(each.bytes, bytes) << text;
      }
      if (each.outcome == Point::kBound) {
        EXPECT_GE(each.seconds, result.best.back().step.seconds) << text;
      }
    }
    EXPECT_EQ(static_cast<std::int64_t>(result.points.size()),
              result.num_plans);
    EXPECT_EQ(count[Point::kDoesNotFit], result.does_not_fit.count);
    EXPECT_LE(count[Point::kPredicted], result.num_predicted);
    EXPECT_GE(count[Point::kPredicted],
              static_cast<std::int64_t>(result.best.size()));
  }
}

// A bound above a prediction would hide a plan.
TEST(PlannerSearch, BoundsAreBelowEveryPrediction) {
  for (const PlanRequest& request : small_requests()) {
    for (const Plan& plan : plans_of(request)) {
      const Prediction exact = predict_plan(request, plan);
      const std::string text = plan.layout_text() + ", " + plan.work_text();
      EXPECT_LE(least_seconds(request, plan), exact.step.seconds) << text;
      EXPECT_LE(least_bytes(request, plan), exact.memory.total()) << text;
    }
  }
}

TEST(PlannerSearch, TriesOnlyWhatTheHybridChapterRuns) {
  const PlanRequest request = request_of("gpt2-medium", "dgx-a100", 8, 16);
  std::map<std::string, Rejection> illegal;
  std::set<int> tps, pps, stages;
  std::set<std::string> schedules, recomputes;
  for (const Plan& plan : plans_of(request, &illegal)) {
    const hybrid::HybridOptions setup = chapter_options(request, plan);
    EXPECT_EQ(hybrid::refusal(options_of(request), setup), "");
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
  expect_text(illegal["--zero-stage"].example, {"m times the traffic"});
}

TEST(PlannerSearch, KeepsToWhatIsFixed) {
  PlanRequest request = request_of("gpt2-medium", "dgx-a100", 8, 16);
  request.limits.tp = 2;
  request.limits.zero_stage = 1;
  request.limits.micro_batch = 2;
  request.limits.recompute = "blocks";
  for (const Plan& plan : plans_of(request)) {
    EXPECT_EQ(plan.setup.tp, 2);
    EXPECT_EQ(plan.setup.zero_stage, 1);
    EXPECT_EQ(plan.micro_batch, 2);
    EXPECT_EQ(plan.recompute, "blocks");
  }
  EXPECT_FALSE(plans_of(request).empty());

  request.limits.pp = 2;
  for (const int chunks : {1, 3}) {
    for (const int sp : {0, 1}) {
      request.limits.chunks = chunks;
      request.limits.sequence_parallel = sp;
      for (const Plan& plan : plans_of(request)) {
        EXPECT_EQ(plan.setup.schedule == "interleaved" ? plan.setup.chunks : 1,
                  chunks);
        EXPECT_EQ(plan.setup.sequence_parallel, sp == 1);
      }
      EXPECT_FALSE(plans_of(request).empty());
    }
  }
}

// Of the best plan's kind, where such a step was measured.
TEST(PlannerSearch, SaysHowFarSuchPredictionsWereOff) {
  PlanRequest request = request_of("gpt-1.3b", "dgx-a100", 8, 64, 1024);
  request.limits.tp = 2;
  request.limits.pp = 4;
  const PlanResult result = search(request);
  expect_text(
      result_text(request, result),
      {"Steps with pipelines on a100: predictions were 7.2 % off", "of 425"});
  const auto json = nlohmann::json::parse(result_json(request, result, false));
  EXPECT_EQ(json["best"][0]["measured"]["steps"], 425);
  PlanRequest other = request_of("gpt2", "kaggle-t4x2", 2, 8, 128);
  other.base.layout.dtype = DType::kF16;
  expect_text(result_text(other, search(other)),
              {"on t4: none was compared with a measured one."});
}

// Its states travel to the host beside the same messages.
TEST(PlannerSearch, AnOffloadIsNotFaster) {
  PlanRequest request = request_of("gpt-1.3b", "dgx-a100", 512, 512, 2048);
  Plan plan;
  plan.setup.dp = 512;
  plan.setup.zero_stage = 3;
  const double on_devices = predict_plan(request, plan).step.seconds;
  plan.offloads = true;
  EXPECT_GE(predict_plan(request, plan).step.seconds, on_devices * (1 - 1e-12));
}

TEST(PlannerSearch, LeavesOutWhatDoesNotFit) {
  // 13 billion parameters on one device: 16 bytes each are 208 GB
  PlanRequest request = request_of("gpt-13b", "dgx-a100", 1, 8, 2048);
  request.limits.offloads = false;
  const PlanResult none = search(request);
  EXPECT_TRUE(none.best.empty());
  EXPECT_EQ(none.does_not_fit.count, none.num_plans);
  // At least the table's 16 bytes: 12 h^2 L + V h parameters
  const double parameters = 12.0 * 5120 * 5120 * 40 + 50257.0 * 5120;
  EXPECT_NEAR(none.least_excess, 16 * parameters - 0.95 * request.capacity(),
              1e9);
  const std::string legend = "tp: ranks that share matrices; pp: stages;";
  expect_text(result_text(request, none), {"No plan fits.", legend});
  // The host holds the optimizer's state
  request.limits.offloads = true;
  const PlanResult offloaded = search(request);
  ASSERT_FALSE(offloaded.best.empty());
  for (const std::string& text :
       {result_text(request, offloaded),
        strategies_text(request, {{"DDP", none}, {"offload", offloaded}})}) {
    expect_fits_terminal(text);
    expect_text(text, {legend});
  }
  for (const Prediction& each : offloaded.best) {
    EXPECT_TRUE(each.plan.offloads);
    EXPECT_LE(each.memory.total(), kUsableMemory * request.capacity());
    EXPECT_NEAR(each.memory.host, parameters * 14, 1e10 + parameters * 2);
  }
  // Less memory never makes a plan faster
  PlanRequest tight = request_of("gpt2-medium", "dgx-a100", 4, 16);
  const double free_s = search(tight).best[0].step.seconds;
  tight.memory_bytes = 3e9;
  EXPECT_GE(search(tight).best[0].step.seconds, free_s);
}

TEST(PlannerSearch, QuestionsWithoutSenseAreRefused) {
  const auto refused = [](const std::function<void(PlanRequest&)>& change,
                          const std::string& part) {
    PlanRequest request = request_of("gpt2", "dgx-a100", 4, 16);
    change(request);
    expect_error([&] { search(request); }, {part});
  };
  refused([](PlanRequest& of) { of.world_size = 0; },
          "--world-size 0: dgx-a100 has 1024 devices");
  refused([](PlanRequest& of) { of.base.sizes.seq = 4096; },
          "--seq 4096: gpt2 has 1024 positions");
  refused([](PlanRequest& of) { of.batch = 0; }, "--batch 0");
  refused([](PlanRequest& of) { of.batch = std::int64_t{1} << 40; },
          "give the samples of a step, 1 to 1048576");
  refused([](PlanRequest& of) { of.limits.tp = 3; },
          "--tp 3, --pp 1, --cp 1: their product");
  refused([](PlanRequest& of) { of.limits.micro_batch = 3; },
          "--micro-batch 3: does not divide");
  refused([](PlanRequest& of) { of.model = "resnet50"; }, "--model resnet50");
  // No degree divides it: every plan is refused, with the reason
  PlanRequest request = request_of("gpt2", "dgx-a100", 4, 3);
  request.limits.tp = request.limits.pp = request.limits.cp = 1;
  PlanResult result = search(request);
  EXPECT_TRUE(result.best.empty());
  EXPECT_EQ(result.illegal["--batch"].example,
            "--batch 3: 4 replicas with 1 micro-batch each cannot have equally "
            "many samples; give 4");
  // Blocks are not the only layers
  request = request_of("gpt-13b", "dgx-a100", 8, 64);
  Plan plan = plan_of(request, 1, 8, 1, 0);
  plan.setup.schedule = "interleaved";
  plan.setup.chunks = 8;
  expect_text(hybrid::refusal(options_of(request), plan.setup),
              {"64 stages; gpt-13b has 42 layers: embedding, 40 blocks and "
               "head; give"});
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
  const PlanRequest request = request_of("gpt-13b", "dgx-a100", 64, 512, 2048);
  Plan plan = plan_of(request, 2, 4, 1, 1, 2);
  plan.setup.sequence_parallel = true;
  plan.setup.schedule = "interleaved";
  plan.recompute = "blocks";
  EXPECT_EQ(plan.layout_text(), "tp 2 x pp 4 x dp 8, SP, ZeRO-1");
  EXPECT_EQ(plan.work_text(), "32 x 2, interleaved 2, recompute blocks");
  EXPECT_EQ(command_of(request, plan, false),
            "./shardbook run hybrid -- --model gpt-13b --dtype bf16 "
            "--world-size 64 --batch 512 --seq 2048 --tp 2 --pp 4 "
            "--partition 6,5,5,5,5,5,5,6 --sequence-parallel --zero-stage 1 "
            "--schedule interleaved --chunks 2 --micro-batches 32 "
            "--recompute blocks --backend nccl --device cuda");
  const auto config = nlohmann::json::parse(config_of(request, plan));
  const auto expected = nlohmann::json::parse(R"({
      "/train_batch_size": 512, "/train_micro_batch_size_per_gpu": 2,
      "/gradient_accumulation_steps": 32, "/zero_optimization/stage": 1,
      "/pipeline/stages": 4, "/shardbook/tensor_parallel/size": 2,
      "/shardbook/schedule": "interleaved", "/shardbook/chunks": 2,
      "/bf16/enabled": true})");
  for (const auto& [path, value] : expected.items()) {
    EXPECT_EQ(config[nlohmann::json::json_pointer(path)], value) << path;
  }
}

}  // namespace
}  // namespace shardbook::planner
