#pragma once

// One script under any plugin, and the same training on one device.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/15_engine/accelerator.h"
#include "chapters/common/run/training.h"
#include "core/context.h"
#include "tests/support/errors.h"
#include "tests/support/larger.h"
#include "tests/support/on_ranks.h"

namespace shardbook::accelerate {

using Ddp = DistributedDataParallelPlugin;
using Fsdp = FullyShardedDataParallelPlugin;
using DeepSpeed = DeepSpeedPlugin;
using Megatron = MegatronLMPlugin;
using Plugins = std::vector<Plugin>;

constexpr const char* kTinyGpt =
    R"({"model_type": "gpt2", "vocab_size": 32, "n_positions": 8, "n_embd": 16,
        "n_layer": 2, "n_head": 2})";
/// f64: only the order of sums differs.
constexpr double kTolerance = 1e-9;

struct Script {
  AcceleratorOptions options = {};
  std::int64_t batch_size = 1;
  std::int64_t samples = 24;
  std::int64_t epochs = 1;
  double max_norm = 0.2;   ///< below the gradient's, so that it changes weights
  bool asks_norm = false;  ///< also without clipping
  bool drop_last = false;
  DType dtype = DType::kF64;
  engine::OptimizerConfig optimizer = {"AdamW", {}, false};
  /// The native scheduler's rates; empty: a constant rate.
  LrSchedule rate = {};
  /// Changes the loss before backward; batches count from 0.
  std::function<Tensor(const Tensor& loss, std::int64_t batch)> on_loss = {};
  /// After this many windows: save_state to this folder, and stop.
  std::size_t stop_after = 0;
  std::string save_to = {}, load_from = {};
  /// Replaces clip_grad_norm_ at the end of a window.
  std::function<void(Accelerator& acc, PreparedModel& model)> clip = {};
  /// In place of the model and the samples of the options.
  std::function<std::shared_ptr<Module>()> make_model = {};
  std::function<Batch(const std::vector<std::int64_t>& samples)> batch = {};
  std::function<void(Accelerator& acc, PreparedModel& model)> at_end = {};
};

using Weights = std::map<std::string, std::vector<double>>;

inline Weights weights_of(const std::vector<NamedTensor>& state) {
  Weights weights;
  for (const NamedTensor& each : state) {
    weights[each.name] = each.tensor.to_vector<double>();
  }
  return weights;
}

/// The largest difference; infinite where names or sizes differ.
inline double apart(const Weights& a, const Weights& b) {
  double most = a.size() == b.size() ? 0 : HUGE_VAL;
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    if (other == b.end()) return HUGE_VAL;
    most = larger(most, largest_gap(values, other->second));
  }
  return most;
}

struct Trace {
  /// By window: the loss, averaged over batches and ranks (each divided by g),
  /// the norm, and the update's rate.
  std::vector<double> losses, norms, rates;
  std::vector<std::vector<std::vector<std::int64_t>>> batches;
  std::vector<bool> skipped;
  std::int64_t scheduler_steps = 0;
  Weights weights;
};

inline Options options_of(const Script& script) {
  Options options;
  options.model = kTinyGpt;
  options.dtype = script.dtype;
  options.seq = 8;
  options.data = "walk";
  options.seed = 3;
  options.optimizer_options = script.optimizer.params;
  options.optimizer = script.optimizer.name();
  options.deterministic = true;
  options.cluster = "none";
  return options;
}

inline DataLoader loader_of(const Script& script, const Options& options,
                            const ModelConfig& config) {
  DataLoader loader;
  loader.data =
      engine::training_data(Dataset::open(options, config), script.samples);
  if (script.batch) loader.data = {script.samples, script.batch};
  loader.batch_size = script.batch_size;
  loader.drop_last = script.drop_last;
  return loader;
}

/// The script: nothing in it depends on the plugin.
inline Trace run_script(const Script& script, ProcessGroup& world) {
  Options options = options_of(script);
  const LoadedModel loaded = build_model(options);
  const std::shared_ptr<Module> own =
      script.make_model ? script.make_model() : nullptr;
  const DataLoader samples = loader_of(script, options, loaded.config);
  Scheduler schedule;
  if (script.rate) {
    schedule.native = std::make_shared<engine::LrScheduler>(script.rate);
  }
  const double g =
      static_cast<double>(script.options.gradient_accumulation_steps);

  Trace trace;
  Accelerator acc(script.options, world);
  auto [model, opt, loader, sched] = acc.prepare(
      own ? *own : *loaded.model, script.optimizer, samples, schedule);
  if (!script.load_from.empty()) acc.load_state(script.load_from);
  std::int64_t batches = 0;
  double window = 0;
  while (loader.epoch() < script.epochs) {
    trace.batches.push_back(loader.batches());
    while (const std::optional<Batch> batch = loader.next()) {
      const auto micro_step = acc.accumulate(model);
      Tensor loss = model.loss(*batch);
      window += acc.reduce(loss, "mean").item() / g;
      if (script.on_loss) loss = script.on_loss(loss, batches);
      batches += 1;
      const double rate = opt.lr();
      EXPECT_EQ(sched.get_last_lr(), rate);
      acc.backward(loss);
      std::optional<double> norm;
      if (script.clip) {
        script.clip(acc, model);
      } else if (script.max_norm > 0 || script.asks_norm) {
        // A no-op between windows
        norm = acc.clip_grad_norm_(model.parameters(), script.max_norm);
        EXPECT_EQ(norm.has_value(), acc.sync_gradients());
      }
      opt.step();
      sched.step();
      opt.zero_grad();
      if (!acc.sync_gradients()) continue;
      trace.losses.push_back(window);
      trace.norms.push_back(norm.value_or(0));
      trace.rates.push_back(rate);
      trace.skipped.push_back(opt.step_was_skipped());
      window = 0;
      if (trace.losses.size() != script.stop_after) continue;
      acc.save_state(script.save_to);
      return trace;
    }
  }
  trace.scheduler_steps = sched.steps_done();
  trace.weights = weights_of(acc.get_state_dict(model));
  if (script.at_end) script.at_end(acc, model);
  return trace;
}

/// check(acc, all, model) of the script's preparations on two ranks.
template <class Check>
void on_prepared(const Plugin& plugin, const Check& check) {
  on_ranks(2, [&](ProcessGroup& world) {
    Script script;
    script.options.plugin = plugin;
    const Options options = options_of(script);
    const LoadedModel loaded = build_model(options);
    Accelerator acc(script.options, world);
    Prepared all = acc.prepare(*loaded.model, script.optimizer,
                               loader_of(script, options, loaded.config));
    check(acc, all, *loaded.model);
    return 0;
  });
}

inline std::vector<Trace> run_on(int ranks, const Script& script) {
  return on_ranks(
      ranks, [&](ProcessGroup& world) { return run_script(script, world); });
}

/// The error of the script on some rank; "" if none threw.
inline std::string error_of(const Script& script, int ranks = 2) {
  return error_on_ranks(
      ranks, [&](ProcessGroup& world) { run_script(script, world); });
}

/// Windows of `batch` samples on one device.
inline ReferenceRun on_one_device(const Script& script, std::int64_t batch,
                                  std::int64_t steps) {
  Options options = options_of(script);
  options.batch = batch;
  options.steps = steps;
  options.clip = script.max_norm;
  options.rate = script.rate;
  ReferenceRun run;
  on_ranks(1, [&](ProcessGroup&) {
    run = train_one_device(options);
    return 0;
  });
  return run;
}

/// DeepSpeed's config for a stage; the sizes are the script's.
inline DeepSpeedPlugin stage(int number) {
  DeepSpeedPlugin plugin;
  plugin.zero_stage = number;
  return plugin;
}

}  // namespace shardbook::accelerate
