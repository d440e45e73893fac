// The plan that follows from the options, made before ranks start.

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "chapters/06_1f1b/asynchronous_reference.h"
#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/06_1f1b/untied.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "chapters/common/run/option_values.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline {
namespace {

bool is_file(const StrategyOptions& setup) {
  return setup.schedule.ends_with(".json");
}

bool is_given(const StrategyOptions& setup, const std::string& flag) {
  return std::find(setup.given.begin(), setup.given.end(), flag) !=
         setup.given.end();
}

/// The user asked for a number of micro-batches, by option or in a file.
bool is_asked(const StrategyOptions& setup) {
  return is_given(setup, "--micro-batches") || is_file(setup);
}

/// Refuses options that the schedule does not read.
void refuse_unread(const StrategyOptions& setup) {
  const bool is_pipedream = setup.schedule == "pipedream";
  SB_CHECK(setup.replicas.empty() || is_pipedream, "--replicas ",
           setup.replicas,
           ": only --schedule pipedream has stages on several ranks");
  SB_CHECK(!setup.vertical_sync || is_pipedream,
           "--vertical-sync: only --schedule pipedream has it");
  const std::pair<const char*, const char*> readers[] = {
      {"--chunks", "interleaved"}, {"--memory-limit", "zb-auto"}};
  for (const auto& [flag, name] : readers) {
    SB_CHECK(setup.schedule == name || !is_given(setup, flag), flag,
             ": --schedule ", setup.schedule,
             " does not read it; give it with --schedule ", name);
  }
  if (!is_given(setup, "--micro-batches")) return;
  SB_CHECK(!is_pipedream, "--micro-batches ", setup.micro_batches,
           ": --schedule pipedream updates after every mini-batch; use "
           "--schedule pipedream-2bw");
  SB_CHECK(!is_file(setup), "--micro-batches ", setup.micro_batches, ": ",
           setup.schedule, " says how many there are; leave the option out");
}

/// A run without a flush: `make` lists some of its steps, the rest repeat.
Schedule without_flush(const Options& options, std::int64_t micro_batches,
                       std::int64_t round,
                       const std::function<Schedule(int listed_steps)>& make) {
  const std::int64_t steps = std::max<std::int64_t>(options.steps, 1);
  // Micro-batches are numbered in tags of messages, two for each stage
  const std::int64_t most = std::numeric_limits<int>::max() /
                            (2 * micro_batches * options.world_size + 1);
  SB_CHECK(steps <= most, "--steps ", options.steps,
           ": a run without a flush numbers its messages from its first step; "
           "give at most ",
           most);
  const std::int64_t listed = schedules::listed_steps(steps, options.world_size,
                                                      static_cast<int>(round));
  Schedule schedule = make(static_cast<int>(listed));
  schedule.repeats = static_cast<int>((steps - listed) / round);
  return schedule;
}

Schedule pipedream_of(const Options& options, const StrategyOptions& setup) {
  std::vector<int> replicas(static_cast<std::size_t>(options.world_size), 1);
  if (!setup.replicas.empty()) {
    replicas = read_counts("--replicas", setup.replicas,
                           "give the ranks of each stage, such as 2,1,1");
  }
  const std::int64_t steps = std::max<std::int64_t>(options.steps, 1);
  std::int64_t round = 1;
  for (const int count : replicas) {
    if (round <= steps) round = std::lcm(round, count);  // no product overflows
  }
  SB_CHECK(steps % round == 0, "--steps ", options.steps,
           ": mini-batches do not divide over --replicas ", setup.replicas,
           "; give a multiple of ", round);
  return without_flush(options, 1, round, [&](int steps) {
    return schedules::pipedream(replicas, steps, setup.vertical_sync);
  });
}

Schedule schedule_of(const Options& options, const StrategyOptions& setup,
                     std::int64_t micro_batches) {
  if (is_file(setup)) return read_schedule(setup.schedule);
  if (setup.schedule == "pipedream") return pipedream_of(options, setup);
  schedules::ScheduleOptions schedule;
  schedule.num_ranks = options.world_size;
  schedule.micro_batches = static_cast<int>(micro_batches);
  schedule.chunks = setup.chunks;
  schedule.memory_limit = setup.memory_limit;
  if (setup.schedule == "pipedream-2bw") {
    return without_flush(options, micro_batches, 1, [&](int steps) {
      schedule.batches = steps;
      return schedules::make_schedule(setup.schedule, schedule);
    });
  }
  return schedules::make_schedule(setup.schedule, schedule);
}

/// Whether the schedule allows this number of micro-batches.
bool takes(const Options& options, const StrategyOptions& setup,
           std::int64_t micro_batches) {
  if (is_file(setup)) return false;
  try {
    schedule_of(options, setup, micro_batches);
  } catch (const Error&) {
    return false;
  }
  return true;
}

/// A step's rows. Rule CEIL may give fewer pieces than the default, but not
/// fewer than the user asked for.
std::vector<MicroBatch> pieces_of(const Options& options,
                                  const StrategyOptions& setup,
                                  std::int64_t micro_batches) {
  const std::int64_t m = micro_batches;
  if (setup.only_shows()) return ceil_micro_batches(m, m);
  if (!is_asked(setup)) {
    return ceil_micro_batches(options.batch, std::min(m, options.batch));
  }
  SB_CHECK(m <= options.batch, "--batch ", options.batch, ": ",
           how_many(m, "micro-batch"), "; give at least as many samples");
  std::vector<MicroBatch> pieces = ceil_micro_batches(options.batch, m);
  const auto count = static_cast<std::int64_t>(pieces.size());
  SB_CHECK(count == m, "--batch ", options.batch, ": makes ",
           how_many(count, "micro-batch"), " of ",
           how_many(pieces[0].rows, "sample"), " (rule CEIL), not ", m,
           "; give a multiple of ", m,
           takes(options, setup, count)
               ? ", or --micro-batches " + std::to_string(count)
               : "");
  return pieces;
}

void check_asynchronous(const Options& options, const StrategyOptions& setup,
                        const Plan& plan) {
  const Schedule& schedule = plan.schedule;
  SB_CHECK(options.clip == 0, "--clip ", options.clip, ": --schedule ",
           setup.schedule,
           " updates each stage by itself, so the norm of the whole gradient "
           "is not known");
  SB_CHECK(shared_parameters(*plan.layers).empty() ||
               (options.save.empty() && options.load.empty() &&
                options.logits.empty()),
           "--save, --load, --logits: --schedule ", setup.schedule,
           " trains the head's token embedding apart from the first layer's; "
           "a file has only one");
  const auto m = static_cast<int>(plan.pieces.size());
  SB_CHECK(
      options.steps == 0 || schedule.total_micro_batches() == m * options.steps,
      "--steps ", options.steps, ": ", setup.schedule, " has ",
      how_many(schedule.num_micro_batches, "micro-batch"), ", ", m,
      " per step; give --steps ", schedule.num_micro_batches / m);
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    SB_CHECK(schedule.num_chunks(rank) == 1, "--schedule ", setup.schedule,
             ": rank ", rank,
             " has several stages; in a schedule with updates each rank has "
             "one");
  }
  const int last = schedule.num_stages - 1;
  for (int b = 0; b < schedule.num_micro_batches; ++b) {
    SB_CHECK(
        schedule.place(b, last).rank == schedule.place(b / m * m, last).rank,
        "--schedule ", setup.schedule, ": micro-batches ", b / m * m, " and ",
        b, " of one step end on different ranks; they must end on one");
  }
}

void check_recompute(const StrategyOptions& setup) {
  if (recompute_from_name(setup.recompute) == Recompute::kNever) return;
  SB_CHECK(setup.schedule != "naive", "--recompute ", setup.recompute,
           ": --schedule naive has one micro-batch in flight at a time, so "
           "recomputation saves nothing; leave it out");
  SB_CHECK(setup.stash, "--recompute ", setup.recompute,
           ": with --no-stash the forward would run again with other weights "
           "than the first time; leave one of them out");
}

}  // namespace

Plan make_plan(const Options& options, const StrategyOptions& setup) {
  Plan plan;
  refuse_unread(setup);
  std::int64_t m = setup.schedule == "pipedream" ? 1 : setup.micro_batches;
  if (is_file(setup)) m = read_schedule(setup.schedule).micro_batches_per_step;
  // Check a given number against the schedule first, then against the batch
  if (is_asked(setup)) plan.schedule = schedule_of(options, setup, m);
  plan.pieces = pieces_of(options, setup, m);
  if (!is_asked(setup)) {
    m = static_cast<std::int64_t>(plan.pieces.size());
    plan.schedule = schedule_of(options, setup, m);
  }
  const Schedule& schedule = plan.schedule;
  SB_CHECK(schedule.num_ranks == options.world_size, "--world-size ",
           options.world_size, ": the ", schedule.name, " schedule is for ",
           how_many(schedule.num_ranks, "rank"));
  check(schedule);
  SB_CHECK(setup.stash || (!schedule.flushes && plan.pieces.size() == 1),
           "--no-stash: --schedule ", setup.schedule,
           " has no stash to leave out; give --schedule pipedream");
  SB_CHECK(!setup.post_validation || schedule.name == "1f1b" ||
               schedule.name == "zb-h1" || schedule.name == "zb-h2",
           "--post-validation: not for --schedule ", setup.schedule,
           "; give 1f1b, zb-h1 or zb-h2");
  check_recompute(setup);
  if (setup.only_shows()) return plan;
  plan.config = model_config(options);
  refuse_image_models(options,
                      "schedules here differ in the order in which "
                      "micro-batches would reach the statistics of its batch "
                      "norms; 05_gpipe and 14_hybrid_3d commit them once per "
                      "batch");
  plan.layers = layers_of(plan.config);
  if (plan.is_asynchronous()) {
    check_asynchronous(options, setup, plan);
    plan.layers = untied(plan.layers);
  }
  SB_CHECK(schedule.num_stages <= plan.layers->size(), "--world-size ",
           options.world_size, ", --schedule ", setup.schedule, ": ",
           how_many(schedule.num_stages, "stage"), "; ", options.model, " has ",
           layers_text(options, plan.layers->size()),
           "; give at most one stage per layer");
  plan.cuts =
      cuts_of(options, setup.partition, *plan.layers, schedule.num_stages, [&] {
        const Dataset data = Dataset::open(options, plan.config);
        return LanguageFeed(options, data, plan.pieces)
            .example(plan.pieces[0].rows);
      });
  return plan;
}

Plan Plan::on_shapes(Options* options) const {
  Plan plan = *this;
  if (!is_asynchronous()) return plan;
  plan.schedule.repeats = 0;
  options->steps = schedule.num_micro_batches / schedule.micro_batches_per_step;
  return plan;
}

std::string Plan::other_training() const {
  return schedule.name == "pipedream-2bw" ? R"("weights one update old")"
                                          : R"("weights some updates old")";
}

ReferenceRun reference_run(const Options& options, const StrategyOptions& setup,
                           const Plan& plan) {
  if (!plan.is_asynchronous()) {
    std::vector<MicroBatch> pieces;
    for (const int b : gradient_order(plan.schedule)) {
      pieces.push_back(plan.pieces[at(b)]);
    }
    return train_one_device(options, pieces);
  }
  SequentialRule rule;
  rule.cuts = plan.cuts;
  const int m = static_cast<int>(plan.pieces.size());
  for (const auto& owners : layout_of(plan.schedule, plan.cuts).owners) {
    rule.replicas.push_back(static_cast<int>(owners.size()));
  }
  if (setup.schedule == "pipedream") {
    rule.version = [is_synchronized = setup.vertical_sync,
                    replicas = rule.replicas](int stage, int b) {
      return is_synchronized ? vertical_sync_version(b, stage, replicas)
                             : pipedream_version(b, stage, replicas);
    };
  } else if (setup.schedule == "pipedream-2bw") {
    rule.version = [=](int, int b) { return double_buffered_version(b, m); };
  } else {
    // A user's schedule: the versions that the lists give
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
