#pragma once

// What the notebooks 05_gpipe, 06_1f1b and 14_hybrid_3d call: schedules in
// virtual time, meshes and their groups, trainings in a pipeline, alone and with
// other axes, and their tables.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule_check.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "notebooks/lessons.h"
#include "sim/timeline_step.h"

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
  const auto layers =
      layers_of(model_config(options_of("05_gpipe --model " + model)));
  const std::vector<int> cuts = cut_by_balance(layers->size(), balance);
  Rows rows = {{"rank", "layers", "parameters"}};
  for (std::size_t i = 0; i < balance.size(); ++i) {
    std::string names;
    for (int layer = cuts[i]; layer < cuts[i + 1]; ++layer) {
      names += (names.empty() ? "" : ", ") + layers->name(layer);
    }
    Stage stage(*layers, cuts[i], cuts[i + 1], InitOptions());
    rows.push_back(cells(i, names, stage.num_parameters()));
  }
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
  const auto bar_of = [](const std::string& name, std::int64_t m) {
    return activation_bar(joined(name, ", m = ", m),
                          train(joined(kSmall, " --batch ", 2 * m), name, m));
  };
  return bars(title, mapped(names, pieces, bar_of), {"KiB", 1024}, "space");
}

/// The idle share by tokens of a micro-batch, of 128 micro-batches: eight
/// blocks of width h on eight ranks of the cluster `textbook`, in f32.
inline Picture idle_by_tokens(const std::string& title, int h,
                              const std::vector<std::string>& names,
                              const std::vector<int>& tokens) {
  const std::string blocks = joined(
      kTextbook, " --world-size 8 --partition type:block --steps 1 --seq 25",
      R"( --model '{"n_layer": 8, "n_head": 4, "n_positions": 64, )",
      R"("vocab_size": 64, "n_embd": )", h, "}' --batch ");
  const auto bar_of = [&](const std::string& name, int each) {
    const double share =
        idle_share(train(joined(blocks, 128 * (each / 25)), name, 128));
    return Bar{joined(name, ", ", each, " tokens"), share, 0,
               percent(share, 1)};
  };
  return bars(title, mapped(names, tokens, bar_of), {"%", 0.01});
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

// --- 3D: groups --------------------------------------------------------------

inline std::string group_text(const std::vector<int>& ranks) {
  std::string text = "{";
  for (const int rank : ranks) {
    text += (text.size() > 1 ? " " : "") + std::to_string(rank);
  }
  return text + "}";
}

/// The groups of each axis, and how many of them leave their node.
inline Picture groups_table(const Topology& mesh, int ranks_per_node) {
  return table_of(
      {"axis", "groups", "cross nodes"}, split_axes("tp-dp-pp"),
      [&](const std::string& axis) {
        std::string text;
        int crossing = 0;
        const std::vector<std::vector<int>> groups = mesh.groups({axis});
        for (const std::vector<int>& group : groups) {
          text += (text.empty() ? "" : " ") + group_text(group);
          crossing +=
              group.front() / ranks_per_node != group.back() / ranks_per_node;
        }
        return cells(axis, text, joined(crossing, " of ", groups.size()));
      });
}

// --- 3D: whose gradient? -----------------------------------------------------

/// A column of eight digits for each title, a row for each rank.
inline Picture digits_table(const std::vector<std::string>& titles,
                            const std::vector<std::vector<double>>& columns) {
  Rows rows = {{"rank"}};
  rows[0].insert(rows[0].end(), titles.begin(), titles.end());
  for (std::size_t rank = 0; rank < columns[0].size(); ++rank) {
    rows.push_back(cells(rank));
    for (const std::vector<double>& column : columns) {
      // A leading 1 keeps the zeros
      rows.back().push_back(fixed(1e9 + column[rank], 0).substr(2));
    }
  }
  return table(rows);
}

/// Parameters whose gradients are summed over the same ranks.
struct BucketLine {
  std::string first = "";   ///< its first parameter
  std::string summed = "";  ///< the groups of the sums
  std::int64_t numel = 0;
  bool is_replicated = false, counts = false;
};

using Buckets = std::vector<std::vector<BucketLine>>;

inline std::vector<BucketLine> buckets_of(ProcessGroup& world,
                                          const std::string& line) {
  hybrid::HybridOptions setup;
  const Options options = options_of(line, setup);
  hybrid::check_legal(options, setup);
  DeviceMesh mesh(world, hybrid::topology_of(setup));
  hybrid::HybridStrategy strategy(options, setup, mesh);
  std::vector<BucketLine> lines;
  for (const hybrid::UpdateBucket& bucket : strategy.update().buckets()) {
    std::string summed = group_text(bucket.data->ranks());
    if (bucket.is_partial) summed += " " + group_text(mesh.group("tp").ranks());
    if (bucket.tied != nullptr)
      summed += " " + group_text(bucket.tied->ranks());
    lines.push_back({bucket.parameters[0].name, summed, bucket.numel(),
                     bucket.is_replicated, bucket.counts});
  }
  return lines;
}

inline Picture buckets_table(const Buckets& ranks) {
  Rows rows = {
      {"rank", "bucket of", "elements", "tp holds", "summed over", "counts"}};
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const BucketLine& line : ranks[rank]) {
      rows.push_back(cells(rank, line.first, line.numel,
                           line.is_replicated ? "the whole" : "parts",
                           line.summed, line.counts ? "yes" : "no"));
    }
  }
  return table(rows);
}

/// Elements that ranks count, by the right rule and by two wrong ones.
inline Picture counted(const Buckets& ranks, int tp) {
  std::int64_t right = 0, without_tp = 0, all = 0;
  for (const std::vector<BucketLine>& lines : ranks) {
    for (const BucketLine& line : lines) {
      all += line.numel;
      if (!line.counts) continue;
      right += line.numel;
      without_tp += line.is_replicated ? tp * line.numel : line.numel;
    }
  }
  const LoadedModel loaded = build_model(options_of("14_hybrid_3d" + kSmall));
  return table({{"rule", "elements"},
                cells("the model has", loaded.model->num_parameters()),
                cells("each once", right),
                cells("what tp holds whole, on every rank of tp", without_tp),
                cells("everything, on every rank", all)});
}

// --- 3D: runs ----------------------------------------------------------------

/// What rank 0 sends in the last step.
inline Picture bytes_by_group(const Report& report) {
  std::vector<Bar> all;
  for (const sim::TimelineEvent& event :
       sim::last_step(report.timelines).groups[0].timeline.events) {
    if (event.category != "comm" || event.bytes == 0) continue;
    // Queues are "comm tp", "send pp"
    const std::string group = event.queue.substr(event.queue.find(' ') + 1);
    auto place = std::find_if(all.begin(), all.end(), [&](const Bar& bar) {
      return bar.name == group;
    });
    if (place == all.end()) place = all.insert(all.end(), {group, 0, 0, ""});
    place->value += event.bytes;
  }
  return bars("Tensor parallelism sends the most", all, {"KiB", 1024}, "comm");
}

/// 13 billion parameters with ZeRO-1 on the shapes of 64 A100, eight in a node.
inline Report try_degrees(int tp, int pp) {
  const int dp = 64 / (tp * pp);
  return run(
      joined("14_hybrid_3d --world-size 64 --model gpt-13b --dtype bf16 "
             "--batch 64 --seq 1024 --steps 2 --zero-stage 1 --tp ",
             tp, " --pp ", pp, " --micro-batches ", 64 / dp, kA100s));
}

/// On the fullest rank.
inline double most_bytes(const Report& report) {
  return most_of(
      report, [](const RankReport& rank) { return rank.peak_total.counted; });
}

inline Picture compare(const std::vector<std::pair<int, int>>& choices) {
  const auto row = [](const std::pair<int, int>& choice) {
    const auto& [tp, pp] = choice;
    const Report report = try_degrees(tp, pp);
    return cells(tp, pp, 64 / (tp * pp), ms(step_s(report), 0),
                 percent(idle_share(report), 1), gib(most_bytes(report), 1));
  };
  return table_of({"tp", "pp", "dp", "step", "idle", "memory"}, choices, row);
}

/// Whether a step takes less than 825 ms with at most 10 GiB on each rank.
/// Prints why degrees do not suit the model.
inline bool are_good(double my_tp, double my_pp) {
  const int tp = static_cast<int>(my_tp), pp = static_cast<int>(my_pp);
  const bool are_degrees = tp == my_tp && pp == my_pp && tp > 0 && pp > 0 &&
                           std::fmod(64, my_tp * my_pp) == 0;
  if (!are_degrees) return false;
  try {
    const Report report = try_degrees(tp, pp);
    return step_s(report) < 0.825 && most_bytes(report) <= 10.0 * (1 << 30);
  } catch (const std::exception& error) {
    std::cout << error.what() << "\n";
    return false;
  }
}

// --- 3D: more devices for one batch ------------------------------------------

/// A step of GPT 6.7B on the shapes of the cluster `textbook`, with 65 536
/// tokens: with ZeRO-3, and with two ranks per layer and four stages.
inline Picture two_ways(const std::vector<int>& all) {
  const auto row = [](int devices) {
    const std::string options =
        joined(kTextbook, " --model gpt-6.7b --batch 256 --seq 256 --steps 2",
               " --world-size ", devices);
    const std::string degrees =
        joined(" --zero-stage 1 --overlap-grad-reduce --tp 2 --pp 4",
               " --micro-batches ", std::min(16, 256 * 8 / devices));
    return cells(devices, ms(step_s(run("03_zero_fsdp" + options)), 0),
                 ms(step_s(run("14_hybrid_3d" + options + degrees)), 0));
  };
  return table_of({"devices", "ZeRO-3", "tp 2 x pp 4 x dp"}, all, row);
}

}  // namespace notes
