#pragma once

// The registry of libraries that can train a module in pieces: forward,
// backward, update.

#include <memory>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero_options.h"
#include "chapters/15_engine/engine.h"

namespace shardbook::engine::internal {

class DataParallelModel {
 public:
  DataParallelModel(Module& module, const DeepSpeedConfig& config,
                    const Mpu& mpu, ProcessGroup& world)
      : module_(module),
        config_(config),
        mpu_(mpu),
        world_(world),
        dp_(mpu.data != nullptr ? *mpu.data : world) {}
  virtual ~DataParallelModel() = default;

  /// `reduces`: the backward of this forward ends a step.
  virtual Tensor forward(const Tensor& inputs, bool reduces) = 0;
  /// Call before a backward that starts from `factor`: a micro-step's share of
  /// the gradients, which are multiplied by `loss_scale`.
  virtual void before_backward(bool reduces, double loss_scale,
                               double factor) = 0;
  /// Clips and updates, or forgets the gradients of an f16 step whose norm is
  /// not finite. Returns the norm of the whole gradient, divided by the loss
  /// scale. Collective.
  virtual double update(double loss_scale) = 0;

  virtual Optimizer& optimizer() = 0;
  Module& module() { return module_; }
  /// The data-parallel ranks.
  ProcessGroup& group() { return dp_; }
  virtual std::vector<NamedTensor> full_state() = 0;
  virtual TrainingState state() = 0;
  /// The bill of all steps of the options, each with `micro_steps` of `rows`
  /// samples. The updates of `skipped` steps were left out (f16).
  virtual Bill bill(const Options& options, const ModelConfig& config,
                    std::int64_t rows, std::int64_t micro_steps,
                    std::int64_t skipped) const = 0;

 protected:
  Module& module_;
  const DeepSpeedConfig config_;
  const Mpu mpu_;
  ProcessGroup &world_, &dp_;
};

/// The choice by zero_optimization.stage, and by what the module has. Collective.
std::unique_ptr<DataParallelModel> make_model(Module& module,
                                              const DeepSpeedConfig& config,
                                              const Mpu& mpu,
                                              ProcessGroup& world);

/// Whether the module has layers of experts, and the model for those.
bool has_experts(Module& module);
std::unique_ptr<DataParallelModel> make_expert_model(
    Module& module, const DeepSpeedConfig& config, const Mpu& mpu,
    ProcessGroup& world);

zero::ZeroOptions zero_options(const DeepSpeedConfig& config, Module& module);
/// The parameters that need gradients.
Tensors trained_parameters(Module& module);
/// Parameters and floating-point buffers in `dtype`.
void cast(Module& module, DType dtype);

}  // namespace shardbook::engine::internal
