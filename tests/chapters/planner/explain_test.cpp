// The parts of a plan's memory and time: they add up to what the plan prints.

#include "chapters/planner/plan_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "chapters/planner/answer.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

using nlohmann::json;

double sum_of(const std::vector<ExplainedPart>& parts,
              const std::string& kind = "") {
  double sum = 0;
  for (const ExplainedPart& each : parts) {
    if (kind.empty() || each.kind == kind) sum += each.value;
  }
  return sum;
}

std::string text_of(const std::vector<ExplainedPart>& parts) {
  std::string text;
  for (const ExplainedPart& each : parts) {
    text += each.kind + ": " + each.formula + " (" + each.page + ")\n";
  }
  return text;
}

TEST(PlannerExplain, PartsAddUpToTheTotals) {
  struct Row {
    const char* model;
    int tp, pp, cp, zero_stage, ep;
    const char *schedule, *recompute;
    bool offloads;
  };
  std::vector<Row> rows = {{"gpt2", 1, 1, 1, 0, 1, "1f1b", "never", false},
                           {"gpt2", 2, 2, 1, 1, 1, "1f1b", "blocks", false}};
  if (!kSanitized) {
    const std::vector<Row> more = {
        {"gpt2", 1, 1, 1, 2, 1, "1f1b", "never", true},
        {"llama-3.2-1b", 1, 1, 1, 2, 1, "1f1b", "never", false},
        {"llama-3.1-8b", 1, 1, 1, 3, 1, "1f1b", "blocks", false},
        {"llama-3.1-8b", 1, 1, 1, 3, 1, "1f1b", "never", true},
        {"llama-3.1-8b", 2, 2, 1, 1, 1, "interleaved", "never", false},
        {"llama-3.1-8b", 1, 4, 2, 1, 1, "zb-h1", "never", false},
        {"mixtral-8x7b", 2, 2, 1, 1, 4, "1f1b", "attention", false}};
    rows.insert(rows.end(), more.begin(), more.end());
  }
  for (const Row& row : rows) {
    const PlanRequest request = request_of(row.model, "dgx-a100", 16, 64, 1024);
    Plan plan = plan_of(request, row.tp, row.pp, row.cp, row.zero_stage);
    plan.setup.ep = row.ep;
    plan.setup.schedule = row.schedule;
    plan.recompute = row.recompute;
    plan.offloads = row.offloads;
    SCOPED_TRACE(std::string(row.model) + ": " + plan.layout_text());
    const Prediction prediction = predict_plan(request, plan);
    const StepMemory& memory = prediction.memory;
    const Explanation explained = explain(request, prediction);
    const std::vector<ExplainedPart>& bytes = explained.memory;
    EXPECT_DOUBLE_EQ(sum_of(bytes, "parameters"), memory.parameters);
    EXPECT_DOUBLE_EQ(sum_of(bytes, "gradients"), memory.gradients);
    EXPECT_DOUBLE_EQ(sum_of(bytes, "optimizer"), memory.optimizer);
    EXPECT_DOUBLE_EQ(sum_of(bytes, "activations"), memory.activations);
    EXPECT_DOUBLE_EQ(sum_of(bytes, "messages"), memory.messages);
    EXPECT_DOUBLE_EQ(sum_of(bytes, "host"), memory.host);
    EXPECT_NEAR(sum_of(explained.time) / prediction.step.seconds, 1, 1e-9);
    for (const auto* parts : {&explained.memory, &explained.time}) {
      for (const ExplainedPart& each : *parts) {
        EXPECT_GT(each.value, 0) << each.kind;
        expect_text(each.page, {"chapters/", ".md#"});
      }
    }
  }
}

// What the explorer draws ends with the step, and keeps what the schedule keeps.
TEST(PlannerExplain, TheTimelineIsThatOfTheStep) {
  struct Row {
    int pp, zero_stage;
    const char* schedule;
    std::int64_t batch;
  };
  for (const auto& [pp, zero_stage, schedule, batch] :
       {Row{1, 0, "1f1b", 32}, Row{1, 3, "1f1b", 32}, Row{4, 1, "1f1b", 32},
        Row{4, 1, "zb-h1", 32}, Row{4, 1, "interleaved", 32},
        Row{2, 1, "1f1b", 512}}) {
    const PlanRequest request = request_of("gpt2", "dgx-a100", 8, batch);
    Plan plan = plan_of(request, 1, pp, 1, zero_stage);
    plan.setup.schedule = schedule;
    PlanResult result;
    result.best.push_back(predict_plan(request, plan));
    const Prediction& best = result.best[0];
    SCOPED_TRACE(plan.layout_text() + ", " + plan.work_text());
    const json timeline =
        json::parse(explain_json(request, result))["timeline"];
    const std::int64_t shown = timeline["micro_batches"];
    if (shown == plan.setup.micro_batches) {
      EXPECT_NEAR(timeline["seconds"].get<double>() / best.step.seconds, 1,
                  1e-9);
    } else {
      EXPECT_LT(timeline["seconds"], best.step.seconds);
    }
    const int chunks = plan.setup.schedule == "interleaved" ? 2 : 1;
    ASSERT_EQ(timeline["lanes"].size(), pp);
    for (const json& lane : timeline["lanes"]) {
      double before = 0, most = 0;
      std::int64_t forwards = 0;
      for (const json& action : lane["actions"]) {
        forwards += action[0] == "F";
        EXPECT_GE(action[3].get<double>(), before * (1 - 1e-12));
        EXPECT_GT(action[4], action[3]);
        before = action[4];
      }
      EXPECT_EQ(forwards, chunks * shown);
      for (const json& moment : lane["kept"]) {
        most = std::max(most, moment[1].get<double>());
      }
      EXPECT_GT(most, 0);
      if (zero_stage < 2) {
        EXPECT_LE(most, best.memory.activations);
      }
      EXPECT_NEAR(lane["kept"].back()[1].get<double>(), 0, 1);
    }
  }
}

// Llama 3.1 8B on 16 ranks, of which each has a sixteenth
TEST(PlannerExplain, FormulasHaveTheDigitsOfTheirValues) {
  const PlanRequest request =
      request_of("llama-3.1-8b", "dgx-a100", 16, 64, 1024);
  const Explanation explained =
      explain(request, predict_plan(request, plan_of(request, 1, 1, 1, 3)));
  EXPECT_DOUBLE_EQ(sum_of(explained.memory, "optimizer"),
                   8030261248.0 * 12 / 16);
  expect_text(text_of(explained.memory),
              {"optimizer: 8,030,261,248 parameters x 12 bytes / 16 ranks "
               "(chapters/03_zero_fsdp/README.md#the-problem)",
               " elements gathered x 2 bytes "
               "(chapters/03_zero_fsdp/details.md#memory)"});
  expect_text(text_of(explained.time),
              {"compute: 4 x ", "exposed: gathers and sums",
               "Adam on 8,030,261,248 parameters / 16 ranks"});
}

// Equal stages, for the output layer is small: a bubble of p - 1 micro-batches
TEST(PlannerExplain, TheBubbleIsThatOfThePage) {
  const PlanRequest request = request_of(
      R"({"n_layer": 16, "n_embd": 4096, "n_head": 32, "n_positions": 1024,)"
      R"( "vocab_size": 64})",
      "dgx-a100", 8, 16, 1024);
  const Plan plan = plan_of(request, 1, 8, 1, 0);
  const Prediction prediction = predict_plan(request, plan);
  const HybridStep& step = prediction.step;
  const double each = (step.compute_s + step.layers_s) / 16;
  EXPECT_NEAR(step.waits_s / (7 * each), 1, 0.02);
  EXPECT_GT(step.compute_s, 50 * step.layers_s);
  const Explanation explained = explain(request, prediction);
  expect_text(text_of(explained.time),
              {"bubble: fill, drain and messages; of equal stages 7 x ",
               "(chapters/06_1f1b/README.md#the-bill)"});
  expect_text(text_of(explained.memory),
              {"activations: 7 sets that wait for their backward x "});
}

json planned(std::vector<std::string> words) {
  words.insert(words.begin(),
               {"plan", "--model", "gpt-1.3b", "--nodes", "2", "--batch", "64",
                "--pp", "1", "--explain", "--format", "json"});
  CommandLine line(words);
  return json::parse(answer(line, confirm).text);
}

TEST(PlannerExplain, TheNextPlanLostByATerm) {
  const json result = planned({});
  const json& next = result.at("explain").at("next");
  EXPECT_NE(next.at("layout"), result.at("best").at(0).at("layout"));
  double sum = 0, most = 0;
  for (const auto& [name, more] : next.at("more_s").items()) {
    if (name == "step") continue;
    sum += more.get<double>();
    most = std::max(most, more.get<double>());
  }
  EXPECT_NEAR(sum, next.at("more_s").at("step").get<double>(), 1e-9);
  EXPECT_EQ(next.at("more_s").at(next.at("most").get<std::string>()), most);
  EXPECT_GT(most, 0);
  // One plan alone has no next
  const json alone = planned({"--tp", "1", "--zero-stage", "1", "--micro-batch",
                              "1", "--recompute", "never"});
  EXPECT_FALSE(alone.at("explain").contains("next"));
  EXPECT_EQ(alone.at("best").size(), 1u);
}

TEST(PlannerExplain, WhatARankSendsAddsUpByLink) {
  const auto with = [](std::vector<std::string> words) {
    words.insert(words.end(), {"--tp", "1", "--micro-batch", "2", "--recompute",
                               "never", "--no-offload"});
    const json result = planned(words);
    std::map<std::string, double> sums;
    std::set<std::string> formulas;
    for (const json& part : result.at("explain").at("sent")) {
      sums[part.at("kind")] += part.at("bytes").get<double>();
      formulas.insert(part.at("formula"));
    }
    const json& sent = result.at("best").at(0).at("sent_bytes");
    EXPECT_EQ(sums.size(), sent.size());
    for (const auto& [link, bytes] : sent.items()) {
      EXPECT_NEAR(sums[link] / bytes.get<double>(), 1, 1e-12) << link;
    }
    return formulas;
  };
  const std::string all = "15 / 16 x 1,315,723,264 ";
  using Formulas = std::set<std::string>;
  EXPECT_EQ(with({"--zero-stage", "0"}),
            (Formulas{"2 x " + all + "gradients x 2 bytes"}));
  EXPECT_EQ(
      with({"--zero-stage", "1"}),
      (Formulas{all + "gradients x 2 bytes", all + "parameters x 2 bytes"}));
  EXPECT_EQ(with({"--zero-stage", "3"}),
            (Formulas{"2 x " + all + "gradients x 2 bytes",
                      "4 x " + all + "parameters x 2 bytes"}));
  // The first rank, of three chunks: the model's begin sends no gradient on
  const Formulas stages =
      with({"--pp", "4", "--chunks", "3", "--zero-stage", "0"});
  EXPECT_EQ(stages.count("24 x 16.8 MB: activations to the next stage"), 1u);
  EXPECT_EQ(stages.count("16 x 16.8 MB: gradients to the stage before"), 1u);
  EXPECT_EQ(stages.count("102,926,336 gradients of the table x 2 bytes"), 1u);
}

TEST(PlannerExplain, TheTextComesBehindTheAnswer) {
  CommandLine line({"plan", "--model", "gpt-1.3b", "--nodes", "1", "--batch",
                    "64", "--tp", "1", "--pp", "1", "--top", "1", "--explain"});
  const std::string text = answer(line, confirm).text;
  expect_text(text, {"\n 2 ", "and is simulated with", "loses most by"});
  EXPECT_LT(text.find("and is simulated with"), text.find("fullest rank"));
  expect_error(
      [] {
        CommandLine line({"plan", "--nodes", "1", "--batch", "64",
                          "--by-strategy", "--explain"});
        answer(line, confirm);
      },
      {"--by-strategy: not with --explain"});
}

}  // namespace
}  // namespace shardbook::planner
