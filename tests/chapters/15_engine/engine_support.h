#pragma once

// A small GPT under an engine, and the same on one device.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "chapters/15_engine/engine.h"
#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/training.h"
#include "core/autograd.h"
#include "core/check.h"
#include "tests/chapters/15_engine/config_support.h"
#include "tests/support/errors.h"
#include "tests/support/larger.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sanitized.h"

namespace shardbook::engine {

using Values = std::vector<double>;

/// 48 samples per step: all world sizes of the tests divide it.
constexpr std::int64_t kBatch = 48;

inline Options small_options(DType dtype = DType::kF64) {
  Options options;
  options.model =
      R"({"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 13,
          "n_positions": 8})";
  options.data = "random";
  options.seq = 4;
  options.batch = kBatch;
  options.seed = 5;
  options.dtype = dtype;
  options.deterministic = true;
  return options;
}

inline DeepSpeedConfig parse(const std::string& text) {
  return DeepSpeedConfig::parse(text, "ds.json");
}

using shardbook::error_of;
inline std::string error_of(const std::string& text) {
  return error_of([&] { parse(text); });
}

inline void expect_error(const std::string& text, const std::string& sentence) {
  const std::string error = error_of(text);
  EXPECT_NE(error.find(sentence), std::string::npos)
      << text << "\n"
      << error << "\nexpected: " << sentence;
}

inline bool remarks(const DeepSpeedConfig& config, const std::string& part) {
  for (const std::string& remark : config.remarks) {
    if (remark.find(part) != std::string::npos) return true;
  }
  return false;
}

inline void expect_kept(const std::string& text) {
  expect_values(parse(text), text);
}

/// Batch, micro-steps and stage, and further keys. Clips only if they ask for
/// it.
inline DeepSpeedConfig config_of(int stage, std::int64_t g,
                                 const std::string& more = "") {
  const bool clips = more.find("gradient_clipping") != std::string::npos;
  return parse("{\"train_batch_size\": " + std::to_string(kBatch) +
               (clips ? "" : ", \"gradient_clipping\": 0") +
               ", \"gradient_accumulation_steps\": " + std::to_string(g) +
               R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "zero_optimization": {"stage": )" +
               std::to_string(stage) + "}" + more + "}");
}

/// 0, 0, .005, .01, .015, .02, .02, ...
inline constexpr const char* kWarmup =
    R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02,
        "warmup_num_steps": 4, "warmup_type": "linear"}})";

inline Values values_of(const std::vector<NamedTensor>& state) {
  Values all;
  for (const NamedTensor& each : state) {
    const auto values = to_dtype(each.tensor, DType::kF64).to_vector<double>();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

/// A model, its data, and the engine around it, on one rank.
struct Trained {
  Trained(const Options& options, const DeepSpeedConfig& config,
          ProcessGroup& world, const InitializeArgs& args = {})
      : options(options),
        loaded(build_model(options)),
        data(Dataset::open(options, loaded.config)),
        parts(initialize(*loaded.model, config, world, args)),
        engine(*parts.engine),
        d(engine.data_parallel_group().size()),
        rank(engine.data_parallel_group().rank()) {}

  /// This rank's samples of micro-step `micro` of step `step`, different from
  /// the other ranks'.
  Batch batch(std::int64_t step, std::int64_t micro) const {
    const std::int64_t g = engine.gradient_accumulation_steps();
    return data.batch(step, kBatch, BatchSlice{rank + d * micro, d * g},
                      kBatch / (d * g));
  }
  Tensor loss(std::int64_t step, std::int64_t micro) {
    const Batch mine = batch(step, micro);
    return language_loss(engine(mine.inputs), mine.targets);
  }
  /// A step by the three calls.
  void step(std::int64_t k) {
    for (std::int64_t i = 0; i < engine.gradient_accumulation_steps(); ++i) {
      engine.backward(loss(k, i));
      engine.step();
    }
  }

  Options options;
  LoadedModel loaded;
  Dataset data;
  Initialized parts;
  Engine& engine;
  int d, rank;
};

/// Weights after these steps on one device; lr(k) is the rate of step k.
inline Values one_device(const Options& options, int steps, double clip = 0,
                         const LrSchedule& lr = {}) {
  return on_ranks(1, [&](ProcessGroup&) {
    const LoadedModel loaded = build_model(options);
    const Dataset data = Dataset::open(options, loaded.config);
    OptimizerOptions adamw;
    adamw.lr = 0.01;
    const auto optimizer =
        make_optimizer("adamw", loaded.model->parameters(), adamw);
    Options setup = options;
    setup.clip = clip;
    for (int k = 0; k < steps; ++k) {
      if (lr) optimizer->set_lr(lr(k));
      accumulate_gradients(setup, *loaded.model, data, k, /*pieces=*/1);
      update_parameters(setup, *optimizer);
    }
    return values_of(state_of(*loaded.model));
  })[0];
}

/// Rank 0's whole model after `train` on every rank.
inline Values after(int world_size, const Options& options,
                    const DeepSpeedConfig& config,
                    const std::function<void(Trained&)>& train,
                    const InitializeArgs& args = {}) {
  return on_ranks(world_size, [&](ProcessGroup& world) {
    Trained trained(options, config, world, args);
    train(trained);
    return values_of(trained.engine.full_state());
  })[0];
}

inline void three_steps(Trained& trained) {
  for (int k = 0; k < 3; ++k) trained.step(k);
}

}  // namespace shardbook::engine
