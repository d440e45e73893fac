#pragma once

// What the notebooks 05_gpipe and 06_1f1b call: schedules in virtual time,
// trainings in a pipeline, and their tables.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "chapters/programs/programs.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

/// A GPT that four threads train in a moment.
inline const std::string kSmall =
    " --world-size 4 --batch 16 --steps 6" + kNano;

/// GPT-2 medium in bf16 on four simulated A100.
inline const std::string kOnA100s =
    kA100s +
    " --model gpt2-medium --dtype bf16 --world-size 4 --batch 32 --seq 512 "
    "--steps 2";

// --- GPipe -------------------------------------------------------------------

/// "the schedule keeps the rules", or the first one that it breaks.
inline std::string problem_of(const pipeline::Schedule& schedule) {
  return text_or_error([&] {
    pipeline::check(schedule);
    return "the schedule keeps the rules";
  });
}

/// Layers and parameters of each rank; `balance` has the numbers of layers.
inline Picture stages(const std::string& model,
                      const std::vector<int>& balance) {
  const Options options = options_of("05_gpipe --model " + model);
  const auto row = [&](ProcessGroup& world) {
    const auto layers = layers_of(model_config(options));
    const std::vector<int> cuts = cut_by_balance(layers->size(), balance);
    const auto i = static_cast<std::size_t>(world.rank());
    std::string names;
    for (int layer = cuts[i]; layer < cuts[i + 1]; ++layer) {
      names += (names.empty() ? "" : ", ") + layers->name(layer);
    }
    Stage stage(*layers, cuts[i], cuts[i + 1], InitOptions());
    return cells(i, names, stage.num_parameters());
  };
  Rows rows = on_ranks(static_cast<int>(balance.size()), row);
  rows.insert(rows.begin(), {"rank", "layers", "parameters"});
  return table(rows);
}

/// Memory and time of the three ways to recompute.
inline Picture recompute_modes() {
  const auto row = [](const std::string& mode) {
    const Report report =
        run("05_gpipe --micro-batches 8 --recompute " + mode + kOnA100s);
    const double bytes = peak_of(report.ranks[1], MemoryKind::kActivation);
    return cells(mode, fixed(bytes / (1 << 20), 1) + " MiB",
                 ms(report.time.step_s, 1), percent(report.time.idle_share, 1));
  };
  return table_of(
      {"recompute", "activations of rank 1", "virtual step", "idle"},
      Cells{"never", "except_last", "always"}, row);
}

/// The fewest micro-batches whose bubble is at most a share of the time.
inline int fewest(int p, double share) {
  int m = 1;
  while (gpipe::idle_share(p, m) > share + 1e-12) ++m;
  return m;
}

/// Messages of n bytes that the formulas claim, against those of a real run of
/// one step with 8 micro-batches. Besides, all ranks sum loss and norm, and the
/// ends sum the embedding.
inline bool are_right(double middle, double last, double m, double n) {
  const Report report =
      run("05_gpipe" + kSmall + " --steps 1 --micro-batches 8");
  const double message = 4.0 * 2 * 32 * 64;  // f32, 2 rows, 32 tokens, h = 64
  const double sums = 2.0 * 3 / 4 * 16;
  const double sent = report.ranks[1].bytes.counted;
  return std::abs(middle / n * message + sums - sent) < 1 && last == m * n;
}

// --- 1F1B --------------------------------------------------------------------

/// The schedule of this name: p ranks, and m micro-batches or, for PipeDream,
/// mini-batches.
inline pipeline::Schedule make(const std::string& name, int p, int m) {
  pipeline::schedules::ScheduleOptions options;
  const bool flushes = name != "pipedream";
  options.num_ranks = p;
  options.micro_batches = flushes ? m : 1;
  options.batches = flushes ? 1 : m;
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
inline NamedSchedule timed(const std::string& name, int p, int m) {
  const pipeline::Schedule schedule = make(name, p, m);
  pipeline::Costs costs;
  if (schedule.num_stages > schedule.num_ranks) {
    costs.forward = costs.backward_input = costs.backward_weight = 0.5;
    costs.backward = 1;
  }
  return {name, schedule, pipeline::replay(schedule, costs)};
}

/// Makespan, idle share and sets of activations, a row per schedule.
inline Picture compare(const std::vector<std::string>& names, int p, int m) {
  const auto row = [&](const std::string& name) {
    const NamedSchedule one = timed(name, p, m);
    const std::vector<int> sets =
        pipeline::max_live_activations(one.schedule, pipeline::Until::kWeight);
    return cells(name, fixed(one.replay.makespan, 1),
                 percent(pipeline::idle_share(one.replay), 1), sets.front(),
                 sets.back());
  };
  return table_of(
      {"schedule", "makespan", "idle", "sets on rank 0", "on the last"}, names,
      row);
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

/// The idle share by tokens of a micro-batch, of 128 micro-batches: eight blocks
/// of width h on eight ranks of the cluster `textbook`, in f32.
inline Picture idle_by_tokens(const std::string& title, int h,
                              const std::vector<std::string>& names,
                              const std::vector<int>& tokens) {
  const std::string blocks = joined(
      kTextbook, " --world-size 8 --partition type:block --steps 1 --seq 25",
      R"( --model '{"n_layer": 8, "n_head": 4, "n_positions": 64, )",
      R"("vocab_size": 64, "n_embd": )", h, "}' --batch ");
  std::vector<Bar> all;
  for (const std::string& name : names) {
    for (const int each : tokens) {
      const double share =
          idle_share(train(joined(blocks, 128 * (each / 25)), name, 128));
      all.push_back(
          {joined(name, ", ", each, " tokens"), share, 0, percent(share, 1)});
    }
  }
  return bars(title, all, {"%", 0.01});
}

inline Bar step_bar(const std::string& name) {
  const double seconds = step_s(train(kOnA100s, name, 8));
  return {name, seconds, 0, ms(seconds, 1)};
}

/// The version of the weights that each mini-batch reads on a stage, and the
/// one to which its gradient is applied.
inline Picture versions_of_stage(int stage, int p, int m) {
  Rows rows = {{"mini-batch", "reads version", "updates version"}};
  for (const pipeline::VersionRecord& record :
       pipeline::versions(make("pipedream", p, m))) {
    if (record.stage != stage) continue;
    rows.push_back(cells(record.micro_batch, record.read, record.applied_to));
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
  return pipeline::max_live_activations(
      make("1f1b", p, 4 * p),
      pipeline::Until::kInput)[static_cast<std::size_t>(i)];
}

inline double interleaved_idle() {
  return pipeline::idle_share(pipeline::replay(make("interleaved", 4, 8)));
}

}  // namespace notes
