#include "chapters/planner/answer.h"

#include <algorithm>
#include <cstdint>
#include <fstream>

#include "chapters/common/models/models.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/worlds.h"
#include "chapters/planner/plan_report.h"
#include "core/check.h"
#include "core/how_many.h"
#include "core/text_file.h"

namespace shardbook::planner {
namespace {

struct Asked {
  PlanRequest request;
  SearchOptions search;
  std::string format = "text", config;
  int nodes = 0;
  std::int64_t memory_bytes = 0;
  bool confirms = false, is_by_strategy = false, explains = false;
};

void add_options(CommandLine& line, Asked& asked) {
  PlanRequest& of = asked.request;
  Limits& only = of.limits;
  line.add("--model", &of.model,
           "gpt-13b, llama-3.1-8b, or any decoder's config.json; alone, it is "
           "counted");
  of.cluster = "dgx-a100";
  line.add("--cluster", &of.cluster, "a preset or FILE.json");
  add_software(line, of.cluster);
  line.add("--nodes", &asked.nodes, "how many of its nodes", 1);
  line.add("--world-size", &of.world_size, "or how many of its devices", 1);
  line.add("--batch", &of.batch, "samples per step, over all ranks", 1);
  line.add("--seq", &of.base.sizes.seq,
           "tokens per sample; the model's positions", 1);
  line.add("--dtype", &of.base.layout.dtype, "of the model",
           {"f32", "bf16", "f16"});
  line.add("--dropout", &of.base.layout.dropout, "probability", 0, 0.999);
  line.add_bytes("--device-memory", &asked.memory_bytes,
                 "of each device; the cluster's");
  line.add("--top", &asked.search.top, "how many plans are shown", 1, 1000);
  line.add("--tp", &only.tp, "only this degree", 1);
  line.add("--pp", &only.pp, "only this degree", 1);
  line.add("--cp", &only.cp, "only this degree", 1);
  line.add("--ep", &only.ep, "only this degree: replicas that share experts",
           1);
  line.add("--sequence-parallel", &only.sequence_parallel,
           "only with it, 1, or without, 0", 0, 1);
  line.add("--zero-stage", &only.zero_stage, "only this stage", 0, 3);
  line.add("--micro-batch", &only.micro_batch, "only this size, in samples", 1);
  line.add("--schedule", &only.schedule, "only this one",
           {"1f1b", "interleaved", "zb-h1"});
  line.add("--chunks", &only.chunks,
           "only so many of each rank; above 1: interleaved", 1);
  line.add("--recompute", &only.recompute, "only this",
           {"never", "attention", "blocks"});
  line.add("--offload", &only.offloads,
           "also plans that use the host's memory");
  line.add("--by-strategy", &asked.is_by_strategy,
           "the best plan of DDP, of each stage of ZeRO, of TP, PP and both");
  line.add("--prune", &asked.search.prunes,
           "bounds first; no-: predict every plan");
  line.add("--confirm", &asked.confirms,
           "run the best plan in the hybrid chapter, on shapes");
  line.add("--explain", &asked.explains,
           "the best plan's memory and time, part by part, and why the next "
           "lost");
  line.add(
      "--points", &asked.search.keeps_points,
      "with --format json: every legal plan, and what was found out of it");
  line.add("--write-config", &asked.config,
           "write the best plan here, for the engine: DeepSpeed's keys");
  line.add("--format", &asked.format, "of the answer", {"text", "json"});
}

/// Tokens of the longest sample that the model trains on.
std::int64_t most_tokens(const std::string& model) {
  const StandIn stand_in = stand_in_of(model, 0);
  const ModelConfig config =
      stand_in.config != nullptr ? *stand_in.config : ModelConfig::read(model);
  const std::int64_t window = config.llama.sliding_window;
  return window > 0 ? std::min(window, config.n_positions) : config.n_positions;
}

void read_request(Asked& asked) {
  PlanRequest& of = asked.request;
  const sim::Cluster cluster = read_cluster(of.cluster);
  of.memory_bytes = static_cast<double>(asked.memory_bytes);
  const int per_node = cluster.devices_per_node;
  SB_CHECK(asked.nodes == 0 || of.world_size == 0 ||
               asked.nodes * per_node == of.world_size,
           "--nodes ", asked.nodes, ", --world-size ", of.world_size, ": ",
           of.cluster, " has ", how_many(per_node, "device"),
           " in a node; give one of the two");
  SB_CHECK(asked.nodes <= cluster.num_nodes, "--nodes ", asked.nodes, ": ",
           of.cluster, " has ", cluster.num_nodes, "; give 1 to ",
           cluster.num_nodes);
  if (asked.nodes > 0) of.world_size = asked.nodes * per_node;
  SB_CHECK(of.world_size > 0, "--nodes: give the nodes of ", of.cluster,
           " to plan for, or --world-size, its devices");
  SB_CHECK(of.batch > 0, "--batch: give the samples of a step, such as ",
           8 * of.world_size);
  if (of.seq() == 0) of.base.sizes.seq = most_tokens(of.model);
  read_model(of, cluster);
}

Answer of_strategies(const Asked& asked) {
  // The table is text only, and names no single plan
  const char* const other = asked.format != "text"      ? "--format"
                            : !asked.config.empty()     ? "--write-config"
                            : asked.confirms            ? "--confirm"
                            : asked.explains            ? "--explain"
                            : asked.search.keeps_points ? "--points"
                                                        : nullptr;
  SB_CHECK(other == nullptr, "--by-strategy: not with ", other,
           ", which is about one list of plans; leave one of them out");
  return {strategies_text(asked.request,
                          search_by_strategy(asked.request, asked.search)),
          0};
}

/// Without devices, the model is counted; other options are about plans.
bool is_count(const CommandLine& line) {
  if (!line.has("--model") || line.has("--nodes") || line.has("--world-size")) {
    return false;
  }
  const auto& given = line.given();
  return std::all_of(given.begin(), given.end(), [](const auto& option) {
    const std::string& name = option.first;
    return name == "--model" || name == "--seq" || name == "--dtype" ||
           name == "--format";
  });
}

Answer of_count(const Asked& asked) {
  CountRequest request;
  request.name = asked.request.model;
  request.model = CountedModel::read(request.name);
  if (request.name[0] == '{') request.name = "this config";
  request.dtype = asked.request.dtype();
  const std::int64_t most = request.model.positions;
  const std::int64_t seq = asked.request.seq();
  SB_CHECK(seq <= most, "--seq ", seq, ": ", request.name, " has ", most,
           " positions; give 1 to ", most);
  request.seq = seq > 0 ? seq : most;
  return {asked.format == "json" ? count_json(request) : count_text(request),
          0};
}

Answer of_plans(const Asked& asked, const Confirm& confirm) {
  SB_CHECK(!asked.search.keeps_points || asked.format == "json",
           "--points: lists all plans in JSON; give --format json as well");
  std::ofstream config;
  if (!asked.config.empty()) {
    config.open(asked.config);
    SB_CHECK(config.is_open(), "--write-config ", asked.config,
             ": cannot be written");
  }
  // --explain compares two
  SearchOptions setup = asked.search;
  if (asked.explains) setup.top = std::max(setup.top, 2);
  PlanResult result = search(asked.request, setup);
  if (asked.confirms && !result.best.empty()) {
    confirm(asked.request, result.best[0]);
  }
  Answer answer;
  answer.text = asked.format == "json"
                    ? result_json(asked.request, result, asked.explains)
                    : result_text(asked.request, result, asked.config);
  if (asked.explains && asked.format == "text") {
    answer.text += explain_text(asked.request, result);
  }
  if (result.best.empty()) {
    answer.status = kExitClaimFailed;
  } else if (!asked.config.empty()) {
    config << config_of(asked.request, result.best[0].plan) << std::flush;
    if (!config)
      fail_to_write("--write-config " + asked.config + ": this file");
  }
  return answer;
}

}  // namespace

Answer answer(CommandLine& line, const Confirm& confirm,
              const Progress& progress) {
  Asked asked;
  asked.search.progress = progress;
  line.describe("shardbook_plan",
                "Which way of splitting a model fits, and is the fastest. With "
                "--model alone: its parameters, operations and memory.",
                "0, a plan fits; 1, none does");
  add_options(line, asked);
  line.parse();
  if (is_count(line)) return of_count(asked);
  read_request(asked);
  check_request(asked.request);
  return asked.is_by_strategy ? of_strategies(asked) : of_plans(asked, confirm);
}

}  // namespace shardbook::planner
