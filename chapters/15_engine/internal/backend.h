#pragma once

// The interface of a plugin's library to an Accelerator.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/15_engine/plugins.h"
#include "chapters/common/models/data.h"
#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"
#include "core/module.h"
#include "core/optim.h"

namespace shardbook::accelerate::internal {

class Backend {
 public:
  virtual ~Backend() = default;

  /// A micro-step begins: does its backward end an optimizer step?
  virtual void begin_micro_step(bool syncs) = 0;
  virtual void end_micro_step() = 0;
  virtual Tensor forward(const Tensor& inputs) = 0;
  /// The mean loss of a rank's batch.
  virtual Tensor loss(const Batch& batch);
  /// Adds the gradient of loss / gradient_accumulation_steps.
  virtual void backward(const Tensor& loss) = 0;
  /// Returns the norm of the whole gradient, without a loss scale. Later calls
  /// of step use the clipped gradient.
  virtual double clip(double max_norm) = 0;
  virtual void step() = 0;
  virtual void zero_grad() = 0;
  /// True if the last step was skipped: its f16 gradient had overflowed.
  virtual bool was_skipped() const = 0;

  virtual Optimizer& optimizer() = 0;
  virtual Tensors parameters() = 0;
  virtual Module& module() = 0;
  virtual ProcessGroup& data_group() = 0;
  /// All parameters and buffers, whole, on rank 0. Collective.
  virtual std::vector<NamedTensor> full_state() = 0;
  /// This rank's parts, and the loss scale.
  virtual TrainingState state() = 0;
  /// Further counters of a library that counts steps itself; and back.
  virtual std::map<std::string, double> numbers() const { return {}; }
  virtual void set_numbers(const std::map<std::string, double>&) {}
};

/// Inputs of the factories below. Model and group outlive the backend.
struct Plan {
  Module& module;
  ProcessGroup& world;
  engine::OptimizerConfig optimizer;
  std::string mixed_precision;
  std::int64_t accumulation = 1;
};

/// Clips and updates as its caller says; with a scaler, leaves out updates whose
/// gradient has overflowed.
class Updating : public Backend {
 public:
  /// `always_measures`: leaves out every update whose norm is not finite.
  Updating(const Plan& plan, std::optional<DynamicLossScaler> scaler,
           bool always_measures)
      : plan_(plan),
        scaler_(std::move(scaler)),
        measures_(always_measures || scaler_) {}

  double clip(double max_norm) override;
  void step() override;
  bool was_skipped() const override { return was_skipped_; }
  TrainingState state() override;

 protected:
  /// The norm of the global gradient, with the loss scale. Collective.
  virtual double norm() = 0;
  /// Updates with the gradient times `factor`.
  virtual void apply(double factor) = 0;
  virtual void forget() {}
  virtual TrainingState parts() = 0;
  double scale() const { return scaler_ ? scaler_->scale() : 1; }

  const Plan plan_;

 private:
  void measure();

  std::optional<DynamicLossScaler> scaler_;
  const bool measures_;
  std::optional<double> norm_;
  double factor_ = 1;
  bool was_skipped_ = false;
};

std::unique_ptr<Backend> make_ddp(const Plan& plan,
                                  const DistributedDataParallelPlugin& plugin);
std::unique_ptr<Backend> make_fsdp(
    const Plan& plan, const FullyShardedDataParallelPlugin& plugin);
std::unique_ptr<Backend> make_engine(const Plan& plan,
                                     const engine::DeepSpeedConfig& config);
/// `example` is a batch of this rank. Collective.
std::unique_ptr<Backend> make_megatron(const Plan& plan,
                                       const MegatronLMPlugin& plugin,
                                       const Batch& example);

}  // namespace shardbook::accelerate::internal
