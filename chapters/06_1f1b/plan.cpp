// What the options say, before there are ranks.

#include <algorithm>
#include <map>
#include <regex>

#include "chapters/06_1f1b/check.h"
#include "chapters/06_1f1b/reference.h"
#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/06_1f1b/trainer.h"
#include "chapters/06_1f1b/untied.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

Schedule schedule_of(const Options& options, const TrainerOptions& how,
                     int micro_batches) {
  if (ends_with(how.schedule, ".json")) return read_schedule(how.schedule);
  const bool is_pipedream = how.schedule == "pipedream";
  SB_CHECK(how.replicas.empty() || is_pipedream, "--replicas ", how.replicas,
           ": only --schedule pipedream has stages on several ranks");
  SB_CHECK(!how.vertical_sync || is_pipedream,
           "--vertical-sync: only --schedule pipedream has it");
  const int steps = static_cast<int>(std::max<std::int64_t>(options.steps, 1));
  if (is_pipedream) {
    std::vector<int> replicas(static_cast<std::size_t>(options.world_size), 1);
    if (!how.replicas.empty()) {
      replicas = read_counts("--replicas", how.replicas,
                             "give the ranks of each stage, such as 2,1,1");
    }
    return schedules::pipedream(replicas, steps, how.vertical_sync);
  }
  schedules::ScheduleOptions as;
  as.num_ranks = options.world_size;
  as.micro_batches = micro_batches;
  as.chunks = how.chunks;
  as.group = how.group;
  as.batches = steps;
  return schedules::make_schedule(how.schedule, as);
}

void check_asynchronous(const Options& options, const TrainerOptions& how,
                        const Plan& plan) {
  const Schedule& schedule = plan.schedule;
  SB_CHECK(options.clip == 0, "--clip ", options.clip, ": --schedule ",
           how.schedule,
           " updates each stage by itself; nobody knows the norm of the whole "
           "gradient then");
  SB_CHECK(
      options.save.empty() && options.load.empty() && options.logits.empty(),
      "--save, --load, --logits: --schedule ", how.schedule,
      " trains the head's token embedding apart from the first layer's; "
      "a file has one");
  const auto m = static_cast<std::int64_t>(plan.pieces.size());
  SB_CHECK(
      options.steps == 0 || schedule.num_micro_batches == m * options.steps,
      "--steps ", options.steps, ": ", how.schedule, " has ",
      schedule.num_micro_batches, " micro-batches, ", m,
      " per step; give --steps ", schedule.num_micro_batches / m);
}

}  // namespace

std::vector<int> cuts_of(const std::string& partition, const LayerList& layers,
                         int num_stages) {
  if (partition == "uniform") return cut_uniform(layers.size(), num_stages);
  if (partition == "parameters") {
    return cut_by_cost(layer_parameters(layers), num_stages);
  }
  if (partition.rfind("type:", 0) == 0) {
    // Stages of equally many layers whose type matches
    std::vector<double> costs;
    InitOptions on_meta;
    on_meta.device = Device::meta();
    try {
      const std::regex type(partition.substr(5),
                            std::regex::ECMAScript | std::regex::icase);
      for (int i = 0; i < layers.size(); ++i) {
        const std::string name = layers.make(i, on_meta)->type_name();
        costs.push_back(std::regex_search(name, type) ? 1 : 0);
      }
    } catch (const std::regex_error&) {
      SB_FAIL("--partition ", partition, ": is no regular expression");
    }
    SB_CHECK(std::count(costs.begin(), costs.end(), 1) >= num_stages,
             "--partition ", partition, ": matches ",
             std::count(costs.begin(), costs.end(), 1), " layers for ",
             num_stages, " stages; each needs one");
    return cut_by_cost(costs, num_stages);
  }
  const std::vector<int> balance =
      read_counts("--partition", partition,
                  "give uniform, parameters, type:REGEX, or the layers of each "
                  "stage (2,1,2)");
  SB_CHECK(static_cast<int>(balance.size()) == num_stages, "--partition ",
           partition, ": ", balance.size(), " stages; the schedule has ",
           num_stages);
  return cut_by_balance(layers.size(), balance);
}

Plan make_plan(const Options& options, const TrainerOptions& how) {
  Plan plan;
  plan.config = model_config(options);
  refuse_image_models(options,
                      "schedules here differ in the order in which "
                      "micro-batches would reach the statistics of its batch "
                      "norms; 05_gpipe commits them once per batch");
  std::int64_t m = how.schedule == "pipedream" ? 1 : how.micro_batches;
  if (ends_with(how.schedule, ".json")) {
    const Schedule schedule = read_schedule(how.schedule);
    m = schedule.micro_batches_per_step;
  }
  plan.pieces = ceil_micro_batches(options.batch, m);
  // Rule CEIL may give fewer pieces than asked for
  const int pieces = static_cast<int>(plan.pieces.size());
  plan.schedule = schedule_of(options, how, pieces);
  const Schedule& schedule = plan.schedule;
  SB_CHECK(schedule.num_ranks == options.world_size, "--world-size ",
           options.world_size, ": the ", schedule.name, " schedule is for ",
           schedule.num_ranks, " ranks");
  SB_CHECK(schedule.micro_batches_per_step == pieces, "--batch ", options.batch,
           ": makes ", pieces,
           " micro-batches of equal size but for the last; ", how.schedule,
           " has ", schedule.micro_batches_per_step, " in a step");
  check(schedule);
  SB_CHECK(how.stash || (!schedule.flushes && pieces == 1),
           "--no-stash: --schedule ", how.schedule,
           " has no stash to leave out; take --schedule pipedream");
  SB_CHECK(!how.post_validation || schedule.name == "1f1b" ||
               schedule.name == "zb-h1" || schedule.name == "zb-h2",
           "--post-validation: not for --schedule ", how.schedule,
           "; give 1f1b, zb-h1 or zb-h2");
  plan.layers = layers_of(plan.config);
  if (plan.is_asynchronous()) {
    check_asynchronous(options, how, plan);
    plan.layers = untied(plan.layers);
  }
  plan.cuts = cuts_of(how.partition, *plan.layers, schedule.num_stages);
  return plan;
}

namespace {

/// The order in which stage 0 sums gradients; where several ranks do, any.
std::vector<MicroBatch> in_order_of_backwards(const Plan& plan) {
  std::vector<MicroBatch> pieces;
  for (std::size_t rank = 0; rank < plan.schedule.actions.size(); ++rank) {
    for (const Action& each : plan.schedule.actions[rank]) {
      if (each.kind != ActionKind::kBackward &&
          each.kind != ActionKind::kBackwardWeight) {
        continue;
      }
      const Place& first = plan.schedule.place(each.micro_batch, 0);
      if (first.rank == static_cast<int>(rank) && first.chunk == each.chunk) {
        pieces.push_back(
            plan.pieces[static_cast<std::size_t>(each.micro_batch)]);
      }
    }
  }
  return pieces;
}

}  // namespace

ReferenceRun reference_run(const Options& options, const TrainerOptions& how,
                           const Plan& plan) {
  if (!plan.is_asynchronous()) {
    return train_one_device(options, in_order_of_backwards(plan));
  }
  SequentialRule rule;
  rule.cuts = plan.cuts;
  const int p = plan.schedule.num_stages;
  const int m = static_cast<int>(plan.pieces.size());
  for (const auto& owners : layout_of(plan.schedule, plan.cuts).owners) {
    rule.replicas.push_back(static_cast<int>(owners.size()));
  }
  if (how.schedule == "pipedream" && how.replicas.empty()) {
    rule.version = [=](int stage, int b) {
      return how.vertical_sync ? vertical_sync_version(b, p)
                               : pipedream_version(b, stage, p);
    };
  } else if (how.schedule == "pipedream-2bw") {
    rule.version = [=](int, int b) { return double_buffered_version(b, m); };
  } else {
    // Replicas, a user's own: as the lists say
    std::map<std::pair<int, int>, int> read;
    for (const VersionRecord& each : versions(plan.schedule)) {
      read[{each.stage, each.micro_batch}] = each.read;
    }
    rule.version = [read](int stage, int b) { return read.at({stage, b}); };
  }
  return train_sequentially(options, *plan.layers, rule, plan.pieces,
                            Dataset::open(options, plan.config));
}

}  // namespace shardbook::pipeline
