// Where a plan's memory and time come from.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "chapters/pictures/text_table.h"
#include "chapters/planner/plan_report.h"
#include "chapters/planner/step_parts.h"
#include "core/how_many.h"
#include "sim/cost_model.h"

namespace shardbook::planner {
namespace {

using Json = nlohmann::ordered_json;
using pictures::text_table::wrap;

/// "8030261248 parameters x 12 bytes / 64 ranks", "7 sets x 1.2 GB"
std::string formula_of(const MemoryTerm& term) {
  constexpr double kMostOfElement = 16;
  std::string text = term.what;
  if (term.count != 1) text = with_commas(term.count) + " " + text;
  if (term.each <= kMostOfElement) {
    text += fmt::format(" x {} bytes", term.each);
  } else if (term.count != 1) {
    text += " x " + bytes_text(term.each);
  }
  if (term.ranks > 1) text += fmt::format(" / {:.0f} ranks", term.ranks);
  return text;
}

std::vector<ExplainedPart> memory_parts(const HybridJob& job) {
  std::vector<MemoryTerm> terms;
  step_memory(job, &terms);
  std::vector<ExplainedPart> parts;
  for (const auto& [name, kind] : StepMemory::kKinds) {
    for (const MemoryTerm& term : terms) {
      if (term.kind != kind) continue;
      parts.push_back({name, term.bytes(), formula_of(term), term.page});
    }
  }
  return parts;
}

std::string waits_formula(const HybridJob& job, const HybridStep& step) {
  if (job.pp == 1) return "gathers and sums that computing does not hide";
  if (job.is_zero_bubble) return "fill, drain and messages of ZB-H1";
  const double each =
      (step.compute_s + step.layers_s) / static_cast<double>(job.micro_batches);
  return fmt::format(
      "fill, drain and messages; of equal stages {} x {}{} without messages",
      job.pp - 1, time_text(each),
      job.chunks > 1 ? fmt::format(" / {}", job.chunks) : "");
}

std::string sums_formula(const HybridJob& job, const HybridStep& step) {
  constexpr const char* kOfStage[] = {
      "all-reduce", "reduce-scatter and all-gather", "all-gather", "none"};
  std::string text = fmt::format(
      "{} of {} elements over {}", kOfStage[job.zero_stage],
      with_commas(step.largest_parameters), how_many(job.replicas(), "rank"));
  if (job.is_tied && job.pp > 1) text += ", and the tied table's";
  return text;
}

std::vector<ExplainedPart> time_parts(const PlanRequest& request,
                                      const Prediction& prediction) {
  const HybridJob job = job_of(request, prediction.plan);
  const HybridStep& step = prediction.step;
  const auto m = static_cast<double>(job.micro_batches);
  const double at_peak = mfu(request, prediction) * step.seconds;
  const bool updates_part = job.zero_stage > 0 && job.replicas() > 1;
  std::vector<ExplainedPart> parts = {
      {"compute", step.compute_s,
       fmt::format("{:.0f} x {}; at the peak rate the model needs {}", m,
                   time_text(step.compute_s / m), time_text(at_peak)),
       "00_single_device/details.md#virtual-time"},
      {"inside the layers", step.layers_s,
       fmt::format("{:.0f} x {} of messages and gaps", m,
                   time_text(step.layers_s / m)),
       page_of_layers(job)},
      {job.pp > 1 ? "bubble" : "exposed", step.waits_s,
       waits_formula(job, step),
       job.pp > 1 ? "06_1f1b/README.md#the-bill"
                  : "03_zero_fsdp/README.md#the-bill"},
      {"sums and gathers", step.gradients_s, sums_formula(job, step),
       job.zero_stage > 0 ? "03_zero_fsdp/README.md#the-bill"
                          : "02_ddp/README.md#the-bill"},
      {"optimizer", step.optimizer_s,
       fmt::format(
           "Adam on {} parameters{}{}", with_commas(step.largest_parameters),
           updates_part ? fmt::format(" / {} ranks", job.replicas()) : "",
           job.offloads ? ", on the host" : ""),
       job.offloads ? "03_zero_fsdp/details.md#dtypes-and-offload"
                    : "00_single_device/details.md#virtual-time"}};
  std::erase_if(parts, [](const auto& each) { return each.value == 0; });
  return parts;
}

/// "32 x 63 / 64 x 8,030,261,248 gradients x 2 bytes", "512 x 16.8 MB: messages
/// inside the layers"
std::string formula_of(const SentTerm& term) {
  std::string text;
  if (term.times != 1) text += with_commas(term.times) + " x ";
  if (term.ranks > 0) {
    text += fmt::format("{} / {} x ", term.ranks - 1, term.ranks);
  }
  if (term.elements == 1)
    return text + bytes_text(term.each) + ": " + term.what;
  return text + fmt::format("{} {} x {} bytes", with_commas(term.elements),
                            term.what, term.each);
}

std::vector<ExplainedPart> sent_parts(const HybridJob& job) {
  std::vector<ExplainedPart> parts;
  for (const SentTerm& each : sent_terms(job, sim::CostModel(job.cluster),
                                         ranks_of(job, runs_of(job)))) {
    parts.push_back({each.link, each.bytes(), formula_of(each), each.page});
  }
  return parts;
}

/// The first with other degrees; else the second; null where there is one.
const Prediction* next_of(const PlanResult& result) {
  if (result.best.size() < 2) return nullptr;
  const std::string layout = result.best[0].plan.layout_text();
  const auto other = std::find_if(result.best.begin(), result.best.end(),
                                  [&](const Prediction& each) {
                                    return each.plan.layout_text() != layout;
                                  });
  return other == result.best.end() ? &result.best[1] : &*other;
}

struct Difference {
  const char* name;
  double here, there;
  double more() const { return there - here; }
};

std::vector<Difference> differences(const HybridStep& here,
                                    const HybridStep& there) {
  return {{"compute", here.compute_s, there.compute_s},
          {"inside the layers", here.layers_s, there.layers_s},
          {"bubble and exposed", here.waits_s, there.waits_s},
          {"sums and gathers", here.gradients_s, there.gradients_s},
          {"optimizer", here.optimizer_s, there.optimizer_s},
          {"step", here.seconds, there.seconds}};
}

const Difference& largest_of(const std::vector<Difference>& all) {
  return *std::max_element(
      all.begin(), all.end() - 1,
      [](const auto& a, const auto& b) { return a.more() < b.more(); });
}

std::string plan_text(const Plan& plan) {
  return plan.layout_text() + "; " + plan.work_text();
}

std::string lines_of(const std::vector<ExplainedPart>& parts,
                     std::string (*text)(double)) {
  constexpr std::size_t kIndent = 30;
  std::string lines;
  for (const ExplainedPart& each : parts) {
    lines += wrap(fmt::format("  {:<17}{:>9}  {}", each.kind, text(each.value),
                              each.formula),
                  kIndent) +
             "      " + each.page + "\n";
  }
  return lines;
}

}  // namespace

Explanation explain(const PlanRequest& request, const Prediction& prediction) {
  const HybridJob job = job_of(request, prediction.plan);
  Explanation explanation = {memory_parts(job), time_parts(request, prediction),
                             sent_parts(job)};
  for (auto* parts :
       {&explanation.memory, &explanation.time, &explanation.sent}) {
    for (ExplainedPart& each : *parts) each.page = "chapters/" + each.page;
  }
  return explanation;
}

std::string explain_text(const PlanRequest& request, const PlanResult& result) {
  if (result.best.empty()) return "";
  const Prediction& best = result.best[0];
  const Explanation parts = explain(request, best);
  std::string text =
      "\n" + wrap(plan_text(best.plan)) +
      fmt::format("memory of the fullest rank, {}:\n",
                  bytes_text(best.memory.total())) +
      lines_of(parts.memory, bytes_text) +
      fmt::format("time of a step, {}:\n", time_text(best.step.seconds)) +
      lines_of(parts.time, time_text);
  if (!parts.sent.empty()) {
    text += "sent by the rank that sends most:\n" +
            lines_of(parts.sent, bytes_text);
  }
  const Prediction* next = next_of(result);
  if (next == nullptr) return text;
  const std::vector<Difference> all = differences(best.step, next->step);
  const Difference& most = largest_of(all);
  text += "\n" + wrap(fmt::format("The next, {}, loses most by {}:",
                                  plan_text(next->plan), most.name));
  std::vector<pictures::text_table::Row> rows = {{"", "best", "next", "more"}};
  for (const Difference& each : all) {
    if (each.here == 0 && each.there == 0) continue;
    rows.push_back(
        {each.name, time_text(each.here), time_text(each.there),
         (each.more() < 0 ? "-" : "+") + time_text(std::abs(each.more()))});
  }
  rows.push_back({"memory", bytes_text(best.memory.total()),
                  bytes_text(next->memory.total()), ""});
  return text + pictures::text_table::align(rows);
}

namespace {

/// A step of the plan, action by action, and what each stage keeps.
Json timeline_json(const HybridJob& job, const Prediction& best) {
  if (job.offloads) return nullptr;
  const std::vector<StageRun> runs = runs_of(job);
  const auto ranks = timed_actions(job, runs, best.step);
  std::size_t micro_batches = 0;
  double end_s = 0;
  Json lanes = Json::array();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    Json actions = Json::array(), kept = Json::array({Json::array({0, 0})});
    double bytes = 0;
    std::size_t forwards = 0;
    for (const TimedAction& each : ranks[rank]) {
      const pipeline::Action& of = each.action;
      const pipeline::ActionKind kind = of.kind;
      const StageRun& run = runs[rank + pipeline::at(of.chunk) * ranks.size()];
      using Kind = pipeline::ActionKind;
      forwards += kind == Kind::kForward && of.chunk == 0;
      bytes += kind == Kind::kForward    ? run.kept_bytes
               : kind == Kind::kBackward ? -run.kept_bytes
               : kind == Kind::kBackwardInput
                   ? run.kept_for_weights_bytes - run.kept_bytes
                   : -run.kept_for_weights_bytes;
      const char* const letter = kind == Kind::kForward          ? "F"
                                 : kind == Kind::kBackwardWeight ? "W"
                                                                 : "B";
      actions.push_back(Json::array(
          {letter, of.micro_batch, of.chunk, each.begin_s, each.end_s}));
      kept.push_back(Json::array({each.end_s, bytes}));
      end_s = std::max(end_s, each.end_s);
    }
    micro_batches = forwards;
    lanes.push_back({{"stage", rank}, {"actions", actions}, {"kept", kept}});
  }
  const double summed_s = end_s + best.step.gradients_s;
  return {{"micro_batches", micro_batches},
          {"seconds", summed_s + best.step.optimizer_s},
          {"lanes", lanes},
          {"after",
           Json::array({Json::array({"gradients", end_s, summed_s}),
                        Json::array({"optimizer", summed_s,
                                     summed_s + best.step.optimizer_s})})}};
}

}  // namespace

std::string explain_json(const PlanRequest& request, const PlanResult& result) {
  Json json = Json::object();
  if (result.best.empty()) return json.dump();
  const Prediction& best = result.best[0];
  const Explanation parts = explain(request, best);
  const auto list = [](const std::vector<ExplainedPart>& all,
                       const char* unit) {
    Json each = Json::array();
    for (const ExplainedPart& part : all) {
      each.push_back({{"kind", part.kind},
                      {unit, part.value},
                      {"formula", part.formula},
                      {"page", part.page}});
    }
    return each;
  };
  json["memory"] = list(parts.memory, "bytes");
  json["time"] = list(parts.time, "seconds");
  json["sent"] = list(parts.sent, "bytes");
  json["timeline"] = timeline_json(job_of(request, best.plan), best);
  const Prediction* next = next_of(result);
  if (next == nullptr) return json.dump();
  const std::vector<Difference> all = differences(best.step, next->step);
  Json more = Json::object();
  for (const Difference& each : all) more[each.name] = each.more();
  json["next"] = {{"layout", next->plan.layout_text()},
                  {"work", next->plan.work_text()},
                  {"more_s", more},
                  {"most", largest_of(all).name}};
  return json.dump();
}

}  // namespace shardbook::planner
