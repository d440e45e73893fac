#pragma once

// The engine as a Strategy: what the program trains with.

#include <memory>
#include <vector>

#include "chapters/15_engine/engine.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::engine {

/// Stages 0 to 3: a model of the options under an engine's forward, backward and
/// step. Rank r of d takes samples r, r + d, ... of each global batch, as in the
/// chapters on data parallelism.
class ModuleStrategy : public Strategy {
 public:
  /// `config` has its batch sizes. Collective.
  ModuleStrategy(const Options& options, const DeepSpeedConfig& config,
                 ProcessGroup& dp);

  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return engine_->optimizer(); }
  std::vector<Bill> bills() override;
  std::string closed_form_command() const override {
    return "./shardbook run engine -- --world-size 4 --cluster textbook";
  }
  std::vector<NamedTensor> full_state() override {
    return engine_->full_state();
  }
  TrainingState state() override;
  /// On shapes, gradients never overflow.
  bool has_predictable_time() const override {
    return engine_->skipped_steps() == skipped_before_;
  }
  Engine& engine() { return *engine_; }

 private:
  const Options options_;
  ProcessGroup& dp_;
  LoadedModel loaded_;
  Dataset data_;
  std::unique_ptr<Engine> engine_;
  /// Steps skipped before the first one of this run.
  std::int64_t skipped_before_ = 0;
};

/// Models whose layers are cut: a chapter's strategy under an engine's
/// train_batch.
class ConfiguredStrategy : public Strategy {
 public:
  ConfiguredStrategy(const Options& options, const DeepSpeedConfig& config,
                     const BatchSizes& sizes, ProcessGroup& world,
                     std::unique_ptr<Strategy> inner);

  StepResult step(std::int64_t step) override;
  void finish() override { inner_.finish(); }
  Optimizer& optimizer() override { return inner_.optimizer(); }
  std::vector<Bill> bills() override { return inner_.bills(); }
  std::string closed_form_command() const override {
    return inner_.closed_form_command();
  }
  bool has_predictable_time() const override {
    return inner_.has_predictable_time();
  }
  std::vector<NamedTensor> full_state() override { return inner_.full_state(); }
  TrainingState state() override { return inner_.state(); }
  LoadedModel whole_model(const Options& options,
                          const std::vector<NamedTensor>& state) override {
    return inner_.whole_model(options, state);
  }
  std::string remarks() override { return inner_.remarks(); }
  Engine& engine() { return engine_; }

 private:
  Strategy& inner_;
  Engine engine_;
};

}  // namespace shardbook::engine
