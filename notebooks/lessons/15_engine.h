#pragma once

// What the notebook 15_engine calls: trainings by a config, the objects of a
// script under an engine or an Accelerator, and their tables.

#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "chapters/15_engine/accelerator.h"
#include "chapters/15_engine/engine.h"
#include "chapters/programs/programs.h"
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
  Report report = run(line + " --config '" + json + "'");
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
        rank(world.rank()),
        pieces(m * world.size()),
        ranks(world.size()) {
    auto config = engine::DeepSpeedConfig::parse(
        R"({"train_batch_size": 8, "optimizer": {"type": "AdamW"}})", "");
    config.batch.accumulation = m;
    made = engine::initialize(*loaded.model, config, world);
  }

  /// The engine's forward of micro-batch i, and its mean loss. Rank r of d
  /// takes rows r + d i, r + d (i + m), ...
  Tensor loss(std::int64_t i) {
    const Batch batch =
        data.batch(/*step=*/0, 8, {rank + ranks * i, pieces}, 8 / pieces);
    return language_loss((*made.engine)(batch.inputs), batch.targets);
  }

  Options options;
  LoadedModel loaded;
  Dataset data;
  std::int64_t rank = 0, pieces = 1, ranks = 1;
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
  std::vector<Bar> drawn;
  for (const std::int64_t m : all) {
    for (const int each : {1, stage}) {
      const double seconds =
          step_s(on_textbook("gpt2-xl", 320, 175, stage_config(each, m)));
      drawn.push_back(
          {joined("stage ", each, ", m = ", m), seconds, 0, ms(seconds, 0)});
    }
  }
  return bars(title, drawn, {"ms", 1e-3});
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
        made(acc.prepare(*loaded.model, adamw(), samples(batch_size))) {}

  static accelerate::AcceleratorOptions windows_of_two(
      const accelerate::Plugin& plugin) {
    accelerate::AcceleratorOptions options;
    options.gradient_accumulation_steps = 2;
    options.plugin = plugin;
    return options;
  }
  static engine::OptimizerConfig adamw() {
    engine::OptimizerConfig optimizer;
    optimizer.type = "AdamW";
    return optimizer;
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

/// Its config clips at 1.0 unless it has another limit.
inline accelerate::Plugin zero(int stage) {
  accelerate::DeepSpeedPlugin plugin;
  plugin.zero_stage = stage;
  return plugin;
}

inline accelerate::Plugin columns(int tp_degree) {
  accelerate::MegatronLMPlugin plugin;
  plugin.tp_degree = tp_degree;
  return plugin;
}

// --- The exercises -----------------------------------------------------------

inline double batch_of(int world, int tp, int pp, std::int64_t micro,
                       std::int64_t accumulation) {
  return static_cast<double>(
      engine::resolve_batch({0, micro, accumulation}, world / (tp * pp)).train);
}

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

}  // namespace notes
