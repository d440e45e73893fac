#include "chapters/planner/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/pictures/text_table.h"
#include "core/how_many.h"

namespace shardbook::planner {
namespace {

using Json = nlohmann::ordered_json;
using pictures::text_table::wrap;

double parameters_of(const PlanRequest& request) {
  if (request.base.sizes.model != nullptr) {
    return static_cast<double>(num_parameters(*request.base.sizes.model));
  }
  const HybridJob job = job_of(request, Plan());
  return static_cast<double>(job.layers) * weight_products(job) +
         static_cast<double>((job.sizes.vocabulary + job.sizes.seq) *
                             job.sizes.hidden);
}

std::string legend(const PlanRequest& request) {
  const bool has_experts = request.base.sizes.has_own_experts();
  return wrap(
      std::string(
          "tp: ranks that share matrices; pp: stages; cp: ranks that "
          "share a sequence; dp: replicas. SP: tp shares norms, too. 16 "
          "x 2: micro-batches x samples of a replica. MFU: share of the "
          "devices' peak rate that the model uses.") +
      (has_experts ? " EP: replicas that share a set of experts." : ""));
}

std::string request_text(const PlanRequest& request) {
  return wrap(fmt::format(
             "{}, {:.2f} billion parameters, on {} of {}'s {}, {} each",
             request.model, parameters_of(request) / 1e9, request.world_size,
             request.base.cluster.name, request.base.cluster.device.name,
             bytes_text(request.capacity()))) +
         fmt::format("{} of {} per step, weights and gradients in {}",
                     how_many(request.batch, "sample"),
                     how_many(request.seq(), "token"),
                     dtype_name(request.dtype()));
}

Json points_json(const PlanResult& result) {
  constexpr const char* kOutcomes[] = {"predicted", "bound", "does not fit"};
  Json rows = Json::array();
  for (const Point& each : result.points) {
    rows.push_back(
        Json::array({each.plan.layout_text(), each.plan.work_text(),
                     each.seconds, each.bytes, kOutcomes[each.outcome]}));
  }
  return {{"columns", {"layout", "work", "step_s", "memory_bytes", "outcome"}},
          {"rows", std::move(rows)}};
}

/// Bytes that a plan keeps on the host, if any.
std::string host_text(const Prediction& each) {
  if (each.memory.host <= 0) return "";
  return fmt::format(", host {}", bytes_text(each.memory.host));
}

std::string fit_text(const PlanRequest& request, double bytes) {
  const double left = kUsableMemory * request.capacity() - bytes;
  return left >= 0 ? bytes_text(left) + " left" : bytes_text(-left) + " over";
}

std::string plan_lines(const PlanRequest& request, const Prediction& each,
                       int number) {
  std::string sent = fmt::format("    sent by a rank: {}; {}",
                                 links_text(each.step) + host_text(each),
                                 sim::trust_name(each.step.trust));
  if (each.confirmed_s > 0) {
    sent += fmt::format("; the chapter on shapes: {}, {}",
                        time_text(each.confirmed_s),
                        bytes_text(each.confirmed_bytes));
  }
  return wrap(fmt::format("{:2}  {:>9}  {}; {}", number,
                          time_text(each.step.seconds), each.plan.layout_text(),
                          each.plan.work_text()),
              15) +
         wrap(fmt::format("    {:.0f} tokens/s, MFU {:.1f} %, idle {:.1f} %; "
                          "memory {} ({})",
                          tokens_per_s(request, each), 100 * mfu(request, each),
                          100 * each.step.idle_share,
                          bytes_text(each.memory.total()),
                          fit_text(request, each.memory.total())),
              4) +
         wrap(sent, 4);
}

std::string rejection_lines(const PlanResult& result) {
  std::string text;
  const auto add = [&](const Rejection& rejection, const std::string& why) {
    if (rejection.count > 0)
      text += wrap(fmt::format("{:6}  {}", rejection.count, why), 8);
  };
  add(result.does_not_fit, fmt::format("do not fit; nearest, {} over: {}",
                                       bytes_text(result.least_excess),
                                       result.does_not_fit.example));
  add(result.slower_bound,
      "cannot be faster: best rate, fastest link and way in and out are "
      "slower");
  add(result.slower, "were predicted, and are slower");
  for (const auto& [option, rejection] : result.illegal) {
    add(rejection, "refused: " + rejection.example);
  }
  return text;
}

Json plan_json(const PlanRequest& request, const Prediction& each) {
  const hybrid::HybridOptions& setup = each.plan.setup;
  Json memory = Json::object(), links = Json::object();
  for (const auto& [name, kind] : StepMemory::kKinds) {
    if (kind == &StepMemory::host) memory["total"] = each.memory.total();
    memory[name] = each.memory.*kind;
  }
  for (const auto& [link, bytes] : each.step.sent_bytes) {
    if (bytes > 0) links[link] = bytes;
  }
  Json json = {{"layout", each.plan.layout_text()},
               {"work", each.plan.work_text()},
               {"dp", setup.dp},
               {"tp", setup.tp},
               {"pp", setup.pp},
               {"cp", setup.cp},
               {"zero_stage", setup.zero_stage},
               {"sequence_parallel", setup.sequence_parallel},
               {"schedule", setup.schedule},
               {"chunks", setup.schedule == "interleaved" ? setup.chunks : 1},
               {"micro_batch", each.plan.micro_batch},
               {"micro_batches", setup.micro_batches},
               {"recompute", each.plan.recompute},
               {"offload", each.plan.offloads},
               {"step_s", each.step.seconds},
               {"pipeline_s", each.step.pipeline_s},
               {"gradients_s", each.step.gradients_s},
               {"optimizer_s", each.step.optimizer_s},
               {"tokens_per_s", tokens_per_s(request, each)},
               {"mfu", mfu(request, each)},
               {"idle_share", each.step.idle_share},
               {"memory_bytes", memory},
               {"sent_bytes", links},
               {"trust", sim::trust_name(each.step.trust)}};
  if (request.trains()) json["command"] = command_of(request, each.plan, false);
  if (const Measured* of = measured(job_of(request, each.plan))) {
    json["measured"] = {{"steps", of->steps},
                        {"mean_error_percent", of->mean},
                        {"largest_error_percent", of->most}};
  }
  if (each.confirmed_s > 0) {
    json["confirmed"] = {{"step_s", each.confirmed_s},
                         {"memory_bytes", each.confirmed_bytes}};
  }
  return json;
}

}  // namespace

std::string bytes_text(double bytes) {
  constexpr double kTera = 1e12, kGiga = 1e9, kMega = 1e6;
  if (bytes >= kTera) return fmt::format("{:.2f} TB", bytes / kTera);
  if (bytes >= kGiga) return fmt::format("{:.1f} GB", bytes / kGiga);
  return fmt::format("{:.1f} MB", bytes / kMega);
}

std::string time_text(double seconds) {
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  return fmt::format("{:.1f} ms", 1e3 * seconds);
}

std::string notes_text(const std::vector<std::string>& remarks) {
  std::string text;
  for (const std::string& remark : remarks) {
    text += wrap("Note: " + remark + ".", 6);
  }
  return text;
}

std::string links_text(const HybridStep& step) {
  std::string text;
  for (const auto& [link, bytes] : step.sent_bytes) {
    if (bytes <= 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", link,
                        bytes_text(bytes));
  }
  return text.empty() ? "nothing" : text;
}

std::string result_text(const PlanRequest& request, const PlanResult& result,
                        const std::string& config_file) {
  std::string text =
      request_text(request) +
      fmt::format("\n{}, {} of them predicted\n",
                  how_many(result.num_plans, "plan"), result.num_predicted) +
      notes_text(request.stand_in.remarks) + "\n";
  if (result.best.empty()) {
    text += "No plan fits.\n";
  } else {
    int number = 0;
    for (const Prediction& each : result.best) {
      text += plan_lines(request, each, ++number);
    }
    text += "\n" + wrap(measured_text(job_of(request, result.best[0].plan)));
  }
  text += "\n" + legend(request) + "\nWhy the others lost:\n" +
          rejection_lines(result);
  if (result.best.empty() || !request.trains()) return text;
  const Plan& best = result.best.front().plan;
  text += "\nThe best one trains with\n  " + command_of(request, best, false) +
          "\n";
  if (!config_file.empty()) {
    text += "or, from the config, with\n  " +
            engine_command_of(request, config_file) + "\n";
  }
  return text + "and is simulated with\n  " + command_of(request, best, true) +
         "\n";
}

std::string strategies_text(const PlanRequest& request,
                            std::vector<Strategy> strategies) {
  const auto seconds = [](const Strategy& of) {
    return of.result.best.empty() ? 1e30 : of.result.best[0].step.seconds;
  };
  std::stable_sort(strategies.begin(), strategies.end(),
                   [&](const Strategy& a, const Strategy& b) {
                     return seconds(a) < seconds(b);
                   });
  std::string text = request_text(request) + "\n" +
                     notes_text(request.stand_in.remarks) + "\n" +
                     legend(request) + "\n";
  constexpr const char* kLine = "{:<12}{:<37}{:>9}{:>9}{:>10}\n";
  text += fmt::format(kLine, "strategy", "best plan", "step", "MFU", "memory") +
          "            micro-batches x samples; sent by a rank\n";
  for (const Strategy& each : strategies) {
    const PlanResult& result = each.result;
    if (result.best.empty()) {
      text += wrap(fmt::format("{:<12}does not fit, {} or more over: {}",
                               each.name, bytes_text(result.least_excess),
                               result.does_not_fit.example),
                   12);
      continue;
    }
    const Prediction& best = result.best[0];
    text += fmt::format(kLine, each.name, best.plan.layout_text(),
                        time_text(best.step.seconds),
                        fmt::format("{:.1f} %", 100 * mfu(request, best)),
                        bytes_text(best.memory.total())) +
            wrap(fmt::format("{:12}{}; {}{}", "", best.plan.work_text(),
                             links_text(best.step), host_text(best)),
                 12);
  }
  return text;
}

std::string result_json(const PlanRequest& request, const PlanResult& result,
                        bool explains) {
  Json json = {{"model", request.model},
               {"cluster", request.base.cluster.name},
               {"world_size", request.world_size},
               {"batch", request.batch},
               {"seq", request.seq()},
               {"dtype", dtype_name(request.dtype())},
               {"memory_bytes", request.capacity()},
               {"usable_memory_bytes", kUsableMemory * request.capacity()},
               {"remarks", request.stand_in.remarks},
               {"plans", result.num_plans},
               {"predicted", result.num_predicted}};
  if (!request.trains()) {
    const ModelConfig& config = *request.stand_in.config;
    json["planned_as"] = config.is_planned ? Json{{"model_type", config.type}}
                                           : Json::parse(config.to_json());
  }
  json["best"] = Json::array();
  for (const Prediction& each : result.best) {
    json["best"].push_back(plan_json(request, each));
  }
  if (explains) json["explain"] = Json::parse(explain_json(request, result));
  if (!result.points.empty()) json["points"] = points_json(result);
  json["lost"] = {{"does_not_fit", result.does_not_fit.count},
                  {"least_excess_bytes", result.least_excess},
                  {"slower_bound", result.slower_bound.count},
                  {"slower", result.slower.count}};
  json["illegal"] = Json::object();
  for (const auto& [option, rejection] : result.illegal) {
    json["illegal"][option] = {{"count", rejection.count},
                               {"example", rejection.example}};
  }
  // Thousands of points are for programs
  return json.dump(result.points.empty() ? 2 : -1) + "\n";
}

std::string command_of(const PlanRequest& request, const Plan& plan,
                       bool simulates) {
  const hybrid::HybridOptions setup = chapter_options(request, plan);
  std::string text = plan.offloads ? "./shardbook run zero_fsdp --"
                                   : "./shardbook run hybrid --";
  const auto add = [&](const std::string& words) { text += " " + words; };
  add(fmt::format("--model {} --dtype {} --world-size {} --batch {} --seq {}",
                  request.model, dtype_name(request.dtype()),
                  request.world_size, request.batch, request.seq()));
  if (request.base.layout.dropout > 0)
    add(fmt::format("--dropout {}", request.base.layout.dropout));
  if (plan.offloads) {
    add(fmt::format("--strategy zero{} --cpu-offload", setup.zero_stage));
  } else {
    if (setup.tp > 1) add(fmt::format("--tp {}", setup.tp));
    if (setup.cp > 1) {
      add(fmt::format("--cp {} --cp-layout {}", setup.cp, setup.cp_layout));
    }
    if (setup.pp > 1) {
      add(fmt::format("--pp {} --partition {}", setup.pp, setup.partition));
    }
    if (setup.ep > 1) add(fmt::format("--ep {}", setup.ep));
    if (setup.sequence_parallel) add("--sequence-parallel");
    if (setup.zero_stage > 0)
      add(fmt::format("--zero-stage {}", setup.zero_stage));
    if (setup.schedule != "1f1b") add("--schedule " + setup.schedule);
    if (setup.schedule == "interleaved") {
      add(fmt::format("--chunks {}", setup.chunks));
    }
  }
  add(fmt::format("--micro-batches {}", setup.micro_batches));
  if (plan.recompute != "never") {
    add(plan.offloads ? "--recompute" : "--recompute " + plan.recompute);
  }
  add(simulates
          ? "--backend sim --no-check --cluster " + request.cluster_source()
          : "--backend nccl --device cuda");
  return text;
}

std::string config_of(const PlanRequest& request, const Plan& plan) {
  const hybrid::HybridOptions setup = chapter_options(request, plan);
  // Buckets as large as those of the prediction
  const auto bucket = setup.bucket_bytes /
                      static_cast<std::int64_t>(dtype_bytes(request.dtype()));
  const Json on_host = {{"device", "cpu"}};
  Json zero = {{"stage", setup.zero_stage},
               {"reduce_bucket_size", bucket},
               {"allgather_bucket_size", bucket}};
  // The prediction gathers every block for forward and again for backward, one
  // ahead of its use
  if (setup.zero_stage == 3) {
    zero["stage3_max_reuse_distance"] = 0;
    zero["stage3_prefetch_bucket_size"] = 1;
    zero["stage3_max_live_parameters"] = 1'000'000'000'000;
  }
  if (plan.offloads) zero["offload_optimizer"] = on_host;
  if (plan.offloads && setup.zero_stage == 3) zero["offload_param"] = on_host;
  Json json = {{"train_batch_size", request.batch},
               {"train_micro_batch_size_per_gpu", plan.micro_batch},
               {"gradient_accumulation_steps", setup.micro_batches},
               {"gradient_clipping", 0},  // as in the other command
               {"bf16", {{"enabled", request.dtype() == DType::kBF16}}},
               {"fp16", {{"enabled", request.dtype() == DType::kF16}}},
               {"zero_optimization", zero}};
  if (setup.pp > 1) {
    json["pipeline"] = {{"stages", setup.pp}, {"partition", setup.partition}};
  }
  Json book = {
      {"tensor_parallel",
       {{"size", setup.tp}, {"sequence_parallel", setup.sequence_parallel}}},
      {"schedule", setup.schedule},
      {"recompute", plan.recompute}};
  if (setup.cp > 1) {
    book["context_parallel"] = {{"size", setup.cp},
                                {"layout", setup.cp_layout}};
  }
  if (setup.schedule == "interleaved") book["chunks"] = setup.chunks;
  if (setup.ep > 1) book["experts"] = {{"ep_size", setup.ep}};
  json["shardbook"] = book;
  return json.dump(2) + "\n";
}

std::string engine_command_of(const PlanRequest& request,
                              const std::string& file) {
  std::string text = fmt::format(
      "./shardbook run engine -- --config {} --model {} --world-size {} "
      "--seq {}",
      file, request.model, request.world_size, request.seq());
  if (dtype_bytes(request.dtype()) > 2) {
    text += fmt::format(" --dtype {}", dtype_name(request.dtype()));
  }
  if (request.base.layout.dropout > 0)
    text += fmt::format(" --dropout {}", request.base.layout.dropout);
  return text + " --backend nccl --device cuda";
}

}  // namespace shardbook::planner
