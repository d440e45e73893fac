#pragma once

// The registry of libraries that can train a module in pieces: forward,
// backward, update.

#include <memory>
#include <string>
#include <vector>

#include "chapters/15_engine/engine.h"

namespace shardbook::engine::internal {

class DataParallelModel {
 public:
  virtual ~DataParallelModel() = default;

  /// `reduces`: the backward of this forward ends a step.
  virtual Tensor forward(const Tensor& inputs, bool reduces) = 0;
  /// Call before a backward whose gradients are multiplied by `loss_scale`.
  virtual void before_backward(bool reduces, double loss_scale) = 0;
  /// Clips and updates, or forgets the gradients of an f16 step whose norm is
  /// not finite. Returns the norm of the whole gradient, divided by the loss
  /// scale. Collective.
  virtual double update(double loss_scale) = 0;

  virtual Optimizer& optimizer() = 0;
  virtual Module& module() = 0;
  virtual ProcessGroup& group() = 0;
  virtual std::vector<NamedTensor> full_state() = 0;
  virtual TrainingState state() = 0;
  virtual double predicted_bytes(std::int64_t steps,
                                 std::int64_t micro_steps) const = 0;
  /// Bytes to send the parameters to the other ranks, once.
  virtual double predicted_publish_bytes() const = 0;
  /// `rows` samples per micro-step; `updates` are steps that f16 did not skip.
  virtual MemoryBill predicted_memory(const Options& options,
                                      const ModelConfig& config,
                                      std::int64_t rows,
                                      std::int64_t updates) const = 0;
  /// Seconds of a step on the cluster `textbook`.
  virtual double step_s(const Options& options, const ModelConfig& config,
                        std::int64_t rows, std::int64_t micro_steps) const = 0;
};

/// The choice by zero_optimization.stage. Collective.
std::unique_ptr<DataParallelModel> make_model(Module& module,
                                              const DeepSpeedConfig& config,
                                              const OptimizerConfig& optimizer,
                                              const Mpu& mpu,
                                              ProcessGroup& world);

/// Parameters and floating-point buffers in `dtype`.
void cast(Module& module, DType dtype);

}  // namespace shardbook::engine::internal
