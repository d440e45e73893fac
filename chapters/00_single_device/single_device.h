#pragma once

// One device: the yardstick. Three ways to make a model fit, none of which
// changes the computation: the batch in pieces, recomputed activations,
// arithmetic in 16 bits.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/piece_graphs.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::single_device {

struct SingleDeviceOptions {
  std::int64_t num_micro_batches = 1;
  /// Keep only each block's input; compute its activations again in backward.
  bool recompute = false;
  /// 16-bit weights with f32 master copies (and, for f16, a scaled loss).
  bool master_weights = false;
  /// On a GPU: record forward and backward once, then launch them as graphs.
  bool cuda_graphs = false;
  LossScaleOptions loss_scale = {};  ///< f16
};

void add_options(CommandLine& line, SingleDeviceOptions& setup);

/// Trains one model on the current device.
class SingleDevice : public Strategy {
 public:
  /// Builds model, data and optimizer from `options`.
  SingleDevice(const Options& options, const SingleDeviceOptions& setup);

  /// One optimizer step on global batch `step`. A step whose gradients overflow
  /// in f16 changes nothing; its grad_norm is infinite.
  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<Bill> bills() override { return {{0, bill(), step_s()}}; }
  std::string closed_form_command() const override {
    return "./shardbook run single_device -- --cluster textbook";
  }
  std::vector<NamedTensor> full_state() override;
  TrainingState state() override;
  /// False in f16 when the last step made no update, or made the first one late
  /// (it creates the optimizer's state): on shapes, gradients never overflow.
  bool has_predictable_time() const override;
  /// The balancing loss of a model's experts, apart from the loss that has it.
  std::string remarks() override;
  /// "balancing_losses": of each step, without their weight.
  std::vector<std::pair<std::string, std::string>> more() override;

  LoadedModel& model() { return loaded_; }
  const Dataset& data() const { return data_; }
  const DynamicLossScaler& scaler() const { return scaler_; }
  /// Bytes held, by kind.
  MemoryBill bill() const;
  /// Seconds of a step on `textbook`: 6 operations for each weight and token,
  /// and attention.
  double step_s() const;

 private:
  StepResult update(StepResult result);

  Options options_;
  SingleDeviceOptions setup_;
  LoadedModel loaded_;
  Dataset data_;
  std::unique_ptr<Optimizer> optimizer_;
  DynamicLossScaler scaler_;
  std::unique_ptr<PieceGraphs> graphs_;  // with cuda_graphs
  std::int64_t num_updates_ = 0;         // in f16
  bool last_step_updated_ = true;
  std::vector<double> balancing_losses_;  // of experts that have one
};

/// The run to compare with: the same precision, without recomputation.
ReferenceRun train_plain(const Options& options, std::int64_t num_micro_batches,
                         const LossScaleOptions& loss_scale = {});

}  // namespace shardbook::single_device
