#pragma once

// What the notebook 05_gpipe calls: models and clusters, runs of GPipe, and tables
// of their results.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "chapters/programs/programs.h"
#include "core/check.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

/// "the schedule keeps the rules", or the first one that it breaks.
inline std::string problem_of(const pipeline::Schedule& schedule) {
  try {
    pipeline::check(schedule);
    return "the schedule keeps the rules\n";
  } catch (const Error& error) {
    return std::string(error.what()) + "\n";
  }
}

/// A GPT that four threads train in a moment.
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 4 --batch 16 --seq 32 --steps "
    "6";

/// GPT-2 medium in bf16 on four simulated A100.
inline const std::string kOnA100s =
    " --backend sim --cluster dgx-a100 --model gpt2-medium --dtype bf16 "
    "--data random --world-size 4 --batch 32 --seq 512 --steps 2";

/// The parameters that a rank builds.
inline std::int64_t stage_parameters(ProcessGroup& world,
                                     const Options& options,
                                     const std::vector<int>& cuts) {
  const auto layers = layers_of(model_config(options));
  const auto i = static_cast<std::size_t>(world.rank());
  Stage stage(*layers, cuts[i], cuts[i + 1], InitOptions());
  return stage.num_parameters();
}

/// Layers and parameters of each rank; `balance` has the numbers of layers.
inline Picture stages(const std::string& model,
                      const std::vector<int>& balance) {
  Options options;
  options.model = model;
  const auto layers = layers_of(model_config(options));
  const std::vector<int> cuts = cut_by_balance(layers->size(), balance);
  const auto numbers = on_ranks(static_cast<int>(balance.size()),
                                stage_parameters, options, cuts);
  Rows rows = {{"rank", "layers", "parameters"}};
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    std::string names;
    for (int layer = cuts[i]; layer < cuts[i + 1]; ++layer) {
      names += (names.empty() ? "" : ", ") + layers->name(layer);
    }
    rows.push_back({std::to_string(i), names, std::to_string(numbers[i])});
  }
  return table(rows);
}

/// Memory and time of the three ways to recompute.
inline Picture recompute_modes() {
  Rows rows = {{"recompute", "activations of rank 1", "virtual step", "idle"}};
  for (const char* mode : {"never", "except_last", "always"}) {
    const Report report =
        run(joined("05_gpipe --micro-batches 8 --recompute ", mode, kOnA100s));
    const double bytes = peak_of(report.ranks[1], MemoryKind::kActivation);
    rows.push_back({mode, fixed(bytes / (1 << 20), 1) + " MiB",
                    ms(report.time.step_s, 1),
                    percent(report.time.idle_share, 1)});
  }
  return table(rows);
}

/// The step time for each number of micro-batches.
inline Picture step_times(const std::string& title, const std::string& options,
                          const std::vector<int>& counts) {
  std::vector<Bar> all;
  for (const int m : counts) {
    const Report report = run(
        joined("05_gpipe --recompute never --partition time --micro-batches ",
               m, options));
    all.push_back({joined("m = ", m), report.time.step_s});
  }
  return bars(title, all, {"ms", 1e-3}, "time");
}

// --- The exercises -----------------------------------------------------------

/// The fewest micro-batches whose bubble is at most a share of the time.
inline int fewest(int p, double share) {
  int m = 1;
  while (gpipe::idle_share(p, m) > share + 1e-12) ++m;
  return m;
}

/// The bytes that `rank` sends in one step.
inline double sent(int rank, int micro_batches) {
  const Report report = run(
      joined("05_gpipe", kSmall, " --steps 1 --micro-batches ", micro_batches));
  return report.ranks[static_cast<std::size_t>(rank)].bytes.counted;
}

/// Messages of n bytes that the formulas claim, against those of a real run.
/// Besides, all ranks sum loss and norm, and the ends sum the embedding.
inline bool are_right(double middle, double last, double m, double n) {
  const double message = 4.0 * 2 * 32 * 64;  // f32, 2 rows, 32 tokens, h = 64
  const double sums = 2.0 * 3 / 4 * 16;
  return std::abs(middle / n * message + sums - sent(1, 8)) < 1 &&
         last == m * n;
}

}  // namespace notes
