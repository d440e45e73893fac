// Plans of the Llama family: their predictions against the hybrid chapter's own
// runs on shapes, and against counts from the published sizes.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/planner/confirm.h"
#include "tests/chapters/planner/planner_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::planner {
namespace {

struct LlamaCase {
  std::string model;
  int ranks, tp, pp, cp, zero_stage;
  bool sequence_parallel = false;
  std::string schedule = "1f1b", recompute = "never";
  std::int64_t seq = 2048;
};


std::vector<LlamaCase> llama_cases() {
  std::vector<LlamaCase> all;
  for (const std::string model : {"llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b", "llama-3.1-70b"}) {
    const int n = 16;
    for (const LlamaCase& each : std::vector<LlamaCase>{{model, n, 1, 1, 1, 0},
                               {model, n, 1, 1, 1, 1, false, "1f1b", "blocks"},
                               {model, n, 1, 1, 1, 2, false, "1f1b", "attention"},
                               {model, n, 1, 1, 1, 2},
                               {model, n, 1, 1, 1, 3},
                               {model, n, 1, 1, 1, 3, false, "1f1b", "blocks"},
                               {model, n, 8, 1, 1, 2, true},
                               {model, n, 8, 1, 1, 3, true},
                               {model, n, 4, 1, 1, 3, true, "1f1b", "blocks"},
                               {model, n, 8, 1, 1, 0, false},
                               {model, n, 2, 4, 1, 1, true, "1f1b", "blocks"},
                               {model, n, 2, 2, 1, 1, false, "interleaved"},
                               {model, n, 2, 4, 1, 1, false, "zb-h1"},
                               {model, n, 1, 8, 1, 1},
                               {model, n, 2, 2, 2, 1},
                               {model, n, 2, 2, 2, 1, true, "1f1b", "attention"}})
      all.push_back(each);
  }
  return all;
}

TEST(PlannerLlama, Explore) {
  for (const LlamaCase& each : llama_cases()) {
    const PlanRequest request = request_of(each.model, "dgx-a100", each.ranks, 64, each.seq);
    Plan plan = plan_of(request, each.tp, each.pp, each.cp, each.zero_stage, 2);
    plan.setup.sequence_parallel = each.sequence_parallel;
    plan.setup.schedule = each.schedule;
    plan.recompute = each.recompute;
    const std::string refusal = hybrid::refusal(options_of(request), chapter_options(request, plan));
    if (!refusal.empty()) { printf("%s %s\n", each.model.c_str(), refusal.c_str()); continue; }
    Prediction prediction = predict_plan(request, plan);
    confirm(request, prediction);
    printf("%-14s %-30s %-36s time %.4f memory %.4f (%.2f GB)\n", each.model.c_str(), plan.layout_text().c_str(), plan.work_text().c_str(),
      prediction.step.seconds / prediction.confirmed_s, prediction.memory.total() / prediction.confirmed_bytes, prediction.confirmed_bytes/1e9);
    fflush(stdout);
  }
}

}  // namespace
}  // namespace shardbook::planner
