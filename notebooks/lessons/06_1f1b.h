#pragma once

// What the notebook 06_1f1b calls: schedules in virtual time, trainings in a
// pipeline, and their tables.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/programs/programs.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

/// The schedule of this name: p ranks, and m micro-batches or, for PipeDream,
/// mini-batches.
inline pipeline::Schedule make(const std::string& name, int p, int m,
                               int chunks = 2) {
  pipeline::schedules::ScheduleOptions options;
  const bool flushes = name != "pipedream";
  options.num_ranks = p;
  options.micro_batches = flushes ? m : 1;
  options.batches = flushes ? 1 : m;
  options.chunks = chunks;
  return pipeline::schedules::make_schedule(name, options);
}

/// The actions of a rank, in order: "F0 F1 B0 F2 ...".
inline std::string list_of(const std::string& name, int p, int m, int rank) {
  const pipeline::Schedule schedule = make(name, p, m);
  std::string text;
  for (const pipeline::Action& action :
       schedule.actions[static_cast<std::size_t>(rank)]) {
    text += pipeline::to_string(action) + " ";
  }
  return text + "\n";
}

/// F, I and W take 1 unit each, B takes 2; half of it where a rank has two
/// stages of half the size.
inline pipeline::Costs costs_of(const pipeline::Schedule& schedule) {
  pipeline::Costs costs;
  if (schedule.num_stages > schedule.num_ranks) {
    costs.forward = costs.backward_input = costs.backward_weight = 0.5;
    costs.backward = 1;
  }
  return costs;
}

inline NamedSchedule timed(const std::string& name, int p, int m) {
  const pipeline::Schedule schedule = make(name, p, m);
  return {name, schedule, pipeline::replay(schedule, costs_of(schedule))};
}

/// Makespan, idle share and sets of activations, a row per schedule.
inline Picture compare(const std::vector<std::string>& names, int p, int m) {
  Rows rows = {
      {"schedule", "makespan", "idle", "sets on rank 0", "on the last"}};
  for (const std::string& name : names) {
    const NamedSchedule one = timed(name, p, m);
    const std::vector<int> sets =
        pipeline::max_live_activations(one.schedule, pipeline::Until::kWeight);
    rows.push_back({name, fixed(one.replay.makespan, 1),
                    percent(pipeline::idle_share(one.replay), 1),
                    std::to_string(sets.front()), std::to_string(sets.back())});
  }
  return table(rows);
}

/// A GPT that four threads train in a moment.
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 4 --batch 16 --seq 32 --steps "
    "6";

/// GPT-2 medium in bf16 on four simulated A100.
inline const std::string kOnA100s =
    " --backend sim --cluster dgx-a100 --model gpt2-medium --dtype bf16 "
    "--data random --world-size 4 --batch 32 --seq 512 --steps 2";

/// Eight blocks of width h on eight ranks of the cluster `textbook`, in f32.
inline std::string blocks_on_textbook(int h, int micro_batches, int tokens) {
  return joined(
      " --backend sim --cluster textbook --data random --world-size 8 "
      "--partition type:block --steps 1 --seq 25 --batch ",
      micro_batches * (tokens / 25),
      R"( --model '{"n_layer": 8, "n_head": 4, "n_positions": 64, )"
      R"("vocab_size": 64, "n_embd": )",
      h, "}'");
}

/// Trains in a pipeline, and on one device for comparison.
inline Report train(const std::string& options, const std::string& schedule,
                    std::int64_t micro_batches) {
  return run(joined("06_1f1b --schedule ", schedule, " --micro-batches ",
                    micro_batches, options));
}

/// A bar for each schedule and number of micro-batches, of two samples each.
inline Picture memory_by_pieces(const std::string& title,
                                const std::vector<std::string>& names,
                                const std::vector<std::int64_t>& pieces) {
  std::vector<Bar> all;
  for (const std::string& name : names) {
    for (const std::int64_t m : pieces) {
      all.push_back(
          activation_bar(joined(name, ", m = ", m),
                         train(joined(kSmall, " --batch ", 2 * m), name, m)));
    }
  }
  return bars(title, all, {"KiB", 1024}, "space");
}

/// The idle share by tokens of a micro-batch, of 128 micro-batches.
inline Picture idle_by_tokens(const std::string& title, int h,
                              const std::vector<std::string>& names,
                              const std::vector<int>& tokens) {
  std::vector<Bar> all;
  for (const std::string& name : names) {
    for (const int each : tokens) {
      const double share =
          train(blocks_on_textbook(h, 128, each), name, 128).time.idle_share;
      all.push_back(
          {joined(name, ", ", each, " tokens"), share, 0, percent(share, 1)});
    }
  }
  return bars(title, all, {"%", 0.01});
}

inline Bar step_bar(const std::string& name) {
  const double step_s = train(kOnA100s, name, 8).time.step_s;
  return {name, step_s, 0, ms(step_s, 1)};
}

/// The version of the weights that each mini-batch reads on a stage, and the
/// one to which its gradient is applied.
inline Picture versions_of_stage(int stage, int p, int m) {
  const pipeline::Schedule schedule = make("pipedream", p, m);
  Rows rows = {{"mini-batch", "reads version", "updates version"}};
  for (const pipeline::VersionRecord& record : pipeline::versions(schedule)) {
    if (record.stage != stage) continue;
    rows.push_back({std::to_string(record.micro_batch),
                    std::to_string(record.read),
                    std::to_string(record.applied_to)});
  }
  return table(rows);
}

inline std::vector<double> losses(const std::string& name, bool stash) {
  const std::string pieces = name == "1f1b" ? " --micro-batches 4" : "";
  return run("06_1f1b --schedule " + name + pieces + kSmall +
             " --steps 30 --lr 3e-4 --no-check" + (stash ? "" : " --no-stash"))
      .losses;
}

inline double most_sets(int p, int i) {
  const pipeline::Schedule schedule = make("1f1b", p, 4 * p);
  return pipeline::max_live_activations(
      schedule, pipeline::Until::kInput)[static_cast<std::size_t>(i)];
}

inline double interleaved_idle() {
  return pipeline::idle_share(pipeline::replay(make("interleaved", 4, 8)));
}

}  // namespace notes
