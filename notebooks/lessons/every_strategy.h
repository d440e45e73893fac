#pragma once

// What the notebooks 15_engine and side_by_side call, which run every strategy
// of the book, by a config and on the same model: trainings, the objects of a
// script under an engine or an Accelerator, and pictures that compare.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/15_engine/accelerator.h"
#include "chapters/15_engine/engine.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "comm/ledger.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

// --- By a config -------------------------------------------------------------

inline std::string small(int world_size) {
  return joined("15_engine --batch 8 --steps 4 --world-size ", world_size,
                kNano);
}

/// Trains under a config by JSON, and compares with one device.
inline Report train(const std::string& line, const std::string& json) {
  Report report = shardbook::run(line + " --config '" + json + "'");
  report.remarks.replace(0, report.remarks.find(':'), "this cell");
  return report;
}

/// "accepted", or why a config is refused.
inline std::string refusal(const std::string& json) {
  return text_or_error([&] {
    engine::DeepSpeedConfig::parse(json, "this cell");
    return "accepted";
  });
}

/// "24 = 3 x 2 x 4", or why the sizes do not fit together.
inline std::string sizes_text(const engine::BatchSizes& given,
                              std::int64_t dp) {
  return text_or_error([&] {
    const engine::BatchSizes all = engine::resolve_batch(given, dp);
    return joined(all.train, " = ", all.micro, " x ", all.accumulation, " x ",
                  dp);
  });
}

// --- Three calls -------------------------------------------------------------

/// A rank's model and data, and an engine around the model: batches of 8
/// samples in m micro-batches.
struct Training {
  Training(ProcessGroup& world, std::int64_t m)
      : options(options_of(small(world.size()))),
        loaded(build_model(options)),
        data(Dataset::open(options, loaded.config)),
        world(world),
        pieces(m * world.size()) {
    auto config = engine::DeepSpeedConfig::parse(
        R"({"train_batch_size": 8, "optimizer": {"type": "AdamW"}})", "");
    config.batch.accumulation = m;
    made = engine::initialize(*loaded.model, config, world);
  }

  /// The engine's forward of micro-batch i, and its mean loss. Rank r of d
  /// takes rows r + d i, r + d (i + m), ...
  Tensor loss(std::int64_t i) {
    const Batch batch = data.batch(
        /*step=*/0, 8, {world.rank() + world.size() * i, pieces}, 8 / pieces);
    return language_loss((*made.engine)(batch.inputs), batch.targets);
  }

  Options options;
  LoadedModel loaded;
  Dataset data;
  ProcessGroup& world;
  std::int64_t pieces = 1;
  engine::Initialized made;
};

/// A row for each m: body(world, m, divides_too) is the norm of the gradient.
template <typename Body>
Picture norms(const Body& body, const std::vector<std::int64_t>& all) {
  return table_of({"m", "norm", "norm, divided twice"}, all,
                  [&](std::int64_t m) {
                    const auto norm = [&](int divides_too) {
                      return fixed(on_ranks(2, body, m, divides_too)[0], 4);
                    };
                    return cells(m, norm(0), norm(1));
                  });
}

// --- In virtual time ---------------------------------------------------------

/// Stage 3 keeps no units, and stages 1 and 2 have one bucket.
inline std::string stage_config(int stage, std::int64_t m) {
  return joined(R"({"gradient_accumulation_steps": )", m,
                R"(, "zero_optimization": {"max_reuse_distance": 0,
               "reduce_bucket_size": 2e9, "stage": )",
                stage, "}}");
}

/// Eight ranks.
inline Report on_textbook(const std::string& model, std::int64_t batch,
                          std::int64_t seq, const std::string& json) {
  return train(
      joined("15_engine --world-size 8 --steps 3 --no-check", kTextbook,
             " --model ", model, " --batch ", batch, " --seq ", seq),
      json);
}

/// The step of GPT-2 XL with 320 sequences of 175 tokens, a bar for each m.
inline Picture times(const std::string& title, int stage,
                     const std::vector<std::int64_t>& all) {
  const auto bar_of = [](std::int64_t m, int each) {
    const double seconds =
        step_s(on_textbook("gpt2-xl", 320, 175, stage_config(each, m)));
    return Bar{joined("stage ", each, ", m = ", m), seconds, 0, ms(seconds, 0)};
  };
  return bars(title, mapped(all, std::vector<int>{1, stage}, bar_of),
              {"ms", 1e-3});
}

// --- The learning rate -------------------------------------------------------

inline Series rates(const std::string& name, std::int64_t warmup, bool is_log,
                    std::int64_t total) {
  engine::WarmupOptions options;
  options.max_lr = 1e-3;
  options.num_steps = warmup;
  options.is_log = is_log;
  options.total_steps = total;
  const LrSchedule rate = engine::warmup_schedule(options);
  Series series = {name};
  for (std::int64_t step = 0; step < 60; ++step) {
    series.values.push_back(1e3 * rate(step));
  }
  return series;
}

// --- Accelerate --------------------------------------------------------------

/// The objects of a script for one process, prepared: 64 samples, windows of
/// two batches.
struct Script {
  Script(ProcessGroup& world, const accelerate::Plugin& plugin,
         std::int64_t batch_size)
      : options(options_of(small(world.size()))),
        loaded(build_model(options)),
        acc(windows_of_two(plugin), world),
        made(acc.prepare(*loaded.model, {"AdamW", {}}, samples(batch_size))) {}

  static accelerate::AcceleratorOptions windows_of_two(
      const accelerate::Plugin& plugin) {
    accelerate::AcceleratorOptions options;
    options.gradient_accumulation_steps = 2;
    options.plugin = plugin;
    return options;
  }
  accelerate::DataLoader samples(std::int64_t batch_size) const {
    accelerate::DataLoader loader;
    loader.data =
        engine::training_data(Dataset::open(options, loaded.config), 64);
    loader.batch_size = batch_size;
    return loader;
  }
  /// Adds a batch's loss to its window's mean.
  void note(const Tensor& loss) {
    window += acc.reduce(loss, "mean").item() / 2;
    if (acc.sync_gradients()) losses.push_back(std::exchange(window, 0.0));
  }

  Options options;
  LoadedModel loaded;
  accelerate::Accelerator acc;
  accelerate::Prepared made;
  std::vector<double> losses;
  double window = 0;
};

/// A plugin's row: loop(world, plugin, batch_size) is the losses of updates.
template <typename Loop>
Cells row(const std::string& name, const Loop& loop,
          const accelerate::Plugin& plugin, std::int64_t batch_size) {
  Cells row = {name};
  const auto ranks = on_ranks(4, loop, plugin, batch_size);
  for (const double loss : ranks[0]) row.push_back(fixed(loss, 4));
  return row;
}

// --- An exercise -------------------------------------------------------------

/// Prints why a config is refused.
inline bool trains_under(const std::string& name, const std::string& json) {
  try {
    const Report report = train(small(4), json);
    return report.remarks.rfind("this cell: " + name + " of ", 0) == 0 &&
           report.parity.passed;
  } catch (const std::exception& error) {
    std::cout << error.what() << "\n";
    return false;
  }
}

// --- Side by side: runs ------------------------------------------------------

struct Model {
  std::string options;
  int steps;
};
/// A small GPT on a random walk, for a moment on live ranks.
inline const Model kLive = {"--dtype f64 --batch 8" + kNano, 4};
/// GPT-2 large in bf16 on simulated A100s.
inline const Model kLarge = {
    "--model gpt2-large --dtype bf16 --batch 16 --seq 1024" + kA100s, 2};

struct Row {
  std::string name = "";
  int ranks = 0, steps = 0;
  Report report = {};
};

/// The end of a line.
inline std::string on(int ranks, const Model& model) {
  return joined(" ", model.options, " --steps ", model.steps, " --world-size ",
                ranks);
}

/// Trains on live ranks, each of which calls this function, and compares with
/// one device that has the whole batch.
inline Row run(
    const std::string& name, int ranks,
    const std::function<void(const Options&, ProcessGroup&, Run&)>& rank) {
  ChapterRun chapter;
  chapter.rank = rank;
  chapter.reference = [](const Options& alone) {
    return train_one_device(alone);
  };
  const Options options = options_of("side_by_side" + on(ranks, kLive));
  return {name, ranks, kLive.steps, run_and_compare(options, chapter)};
}

/// All strategies.
inline std::vector<Row> run_all(const Model& model,
                                const std::string& more = "") {
  std::vector<Row> rows;
  for (const auto& [name, ranks, line] :
       std::vector<std::tuple<const char*, int, const char*>>{
           {"one device", 1, "00_single_device"},
           {"DataParallel", 4, "01_data_parallel"},
           {"DDP", 4, "02_ddp"},
           {"ZeRO-1", 4, "03_zero_fsdp --strategy zero1"},
           {"ZeRO-2", 4, "03_zero_fsdp --strategy zero2"},
           {"ZeRO-3", 4, "03_zero_fsdp --strategy zero3"},
           {"FSDP", 4, "03_zero_fsdp --strategy fsdp"},
           {"GPipe", 4, "05_gpipe --micro-batches 4"},
           {"1F1B", 4, "06_1f1b --schedule 1f1b --micro-batches 4"},
           {"ZB-H1", 4, "06_1f1b --schedule zb-h1 --micro-batches 4"},
           {"tensor parallel", 4, "07_tensor_parallel"},
           {"2D", 4, "08_tensor_parallel_2d"},
           {"2.5D", 8, "09_tensor_parallel_2p5d --depth 2"},
           {"3D", 8, "10_tensor_parallel_3d"},
           {"DTensor 2x2", 4, "11_dtensor --mesh 2x2 --data-parallel ddp"},
           {"ring attention", 4,
            "12_sequence_parallel --kind ring --layout zigzag"},
           {"Ulysses", 4, "12_sequence_parallel --kind ulysses"},
           {"dp x tp x pp", 8, "14_hybrid_3d --tp 2 --pp 2 --zero-stage 1"}}) {
    rows.push_back({name, ranks, model.steps,
                    shardbook::run(line + on(ranks, model) + more)});
  }
  return rows;
}

/// The row with this name; the first one if there is none.
inline const Row& row_of(const std::vector<Row>& all, const std::string& name) {
  for (const Row& row : all) {
    if (row.name == name) return row;
  }
  return all[0];
}

// --- What they need ----------------------------------------------------------

/// Bytes per step of the rank that sends the most.
inline double most_bytes(const Row& row) {
  return most_of(row.report,
                 [](const RankReport& rank) { return rank.bytes.counted; }) /
         row.steps;
}

inline const std::vector<MemoryKind> kKinds = {
    MemoryKind::kParameter, MemoryKind::kGradient, MemoryKind::kOptimizerState,
    MemoryKind::kActivation};

/// The sum of the peaks of these kinds, on the fullest rank.
inline double most_memory(const Row& row) {
  return most_of(row.report, [](const RankReport& rank) {
    double sum = 0;
    for (const MemoryKind kind : kKinds) sum += peak_of(rank, kind);
    return sum;
  });
}

/// Virtual time of a step.
inline double seconds(const Row& row) { return step_s(row.report); }

// --- Pictures and tables -----------------------------------------------------

/// Losses, and whether the weights equal those of one device.
inline Picture numbers(const std::vector<Row>& all) {
  return table_of(
      {"strategy", "ranks", "first loss", "last loss", "weights"}, all,
      [](const Row& row) {
        return cells(row.name, row.ranks, fixed(row.report.losses.front(), 10),
                     fixed(row.report.losses.back(), 10),
                     row.report.parity.passed ? "equal" : "DIFFERENT");
      });
}

/// A bar for each strategy: of(row).
template <typename Of>
std::vector<Bar> bars_of(const std::vector<Row>& all, const Of& of) {
  return mapped(all, [&](const Row& row) {
    const std::string ranks =
        row.ranks == 1 ? "" : joined(", ", row.ranks, " ranks");
    return Bar{row.name + ranks, of(row)};
  });
}

/// By kind, of the fullest rank of each strategy.
inline Picture memory_table(const std::vector<Row>& all) {
  return table_of(
      {"strategy", "parameters", "gradients", "optimizer", "activations"}, all,
      [](const Row& row) {
        Cells line = {row.name};
        for (const MemoryKind kind : kKinds) {
          const double bytes = most_of(row.report, [&](const RankReport& rank) {
            return peak_of(rank, kind);
          });
          line.push_back(fixed(bytes / (1 << 20), 2) + " MiB");
        }
        return line;
      });
}

/// Time, bytes per step and memory of a simulated step.
inline Picture costs(const std::vector<Row>& all) {
  return table_of(
      {"strategy", "ranks", "step", "speed-up", "idle", "sent", "memory"}, all,
      [&](const Row& row) {
        return cells(row.name, row.ranks, ms(seconds(row), 0),
                     fixed(seconds(all[0]) / seconds(row), 2),
                     percent(idle_share(row.report), 0),
                     gib(most_bytes(row), 2), gib(most_memory(row), 2));
      });
}

// --- An exercise -------------------------------------------------------------

/// Whether no other strategy on four ranks that fits is faster.
inline bool is_fastest(const std::vector<Row>& all, const std::string& name,
                       double gibibytes) {
  const auto fits = [&](const Row& row) {
    return row.ranks == 4 && most_memory(row) < gibibytes * (1 << 30);
  };
  const Row& mine = row_of(all, name);
  if (mine.name != name || !fits(mine)) return false;
  return std::none_of(all.begin(), all.end(), [&](const Row& row) {
    return fits(row) && seconds(row) < seconds(mine);
  });
}

}  // namespace notes
