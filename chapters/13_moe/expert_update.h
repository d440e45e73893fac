#pragma once

// Gradients and updates of a model with layers of experts.
//
//                ranks that hold the same     stage 0        stages 1 and 2
//   dense        DP, dp ranks                 all-reduce     ZeRO over DP
//   experts      their replicas, r ranks      all-reduce     ZeRO over replicas
//
// Each rank's loss is the mean over its own tokens, so every gradient is divided
// by dp: the experts' too, although only r ranks sum them: the all-to-all has
// already brought the tokens of dp / r ranks. Under ZeRO, which divides by the
// size of its group, the rest of the divisor works like a loss scale.
//
//   update.begin_backward(is_last, loss_scale);   // before each backward
//   update.reduce();                              // stage 0: after the last one
//   const double norm = update.norm();
//   update.apply(norm);                           // clips, updates, or skips (f16)
//
// deepspeed/moe/utils.py calls a `ParameterGroup` a param group with "moe": True.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"
#include "core/module.h"
#include "core/optim.h"

namespace shardbook::moe {

/// Some of a module's parameters, as a module of their own.
class ParameterSubset : public ModuleOf<ParameterSubset> {
 public:
  explicit ParameterSubset(std::vector<NamedTensor> parameters)
      : parameters_(std::move(parameters)) {}
  void members(MemberVisitor& visit) override {
    for (NamedTensor& each : parameters_) {
      visit.parameter(each.name, each.tensor);
    }
  }
  std::string type_name() const override { return "ParameterSubset"; }

 private:
  std::vector<NamedTensor> parameters_;
};

/// Several ZeRO optimizers of one training: their parts, and their steps after
/// loading.
TrainingState joint_state(const std::vector<zero::ZeroOptimizer*>& zeros);

/// Parameters that the same ranks hold.
struct ParameterGroup {
  std::string label;  ///< of their all-reduce
  ProcessGroup& replicas;
  std::function<bool(const std::string& name)> contains;
  /// Whether the norm counts a parameter of these ranks; false where another
  /// group of ranks holds the same elements. Empty: it counts all.
  std::function<bool(const std::string& name)> counts = {};
};

class ExpertUpdate {
 public:
  /// Each parameter belongs to the first group that contains it. The first group
  /// is the dense one: its ranks are all that have tokens. `world` has the ranks
  /// of all groups. `options.stage` may be 0. Groups outlive the object.
  ExpertUpdate(const std::vector<NamedTensor>& parameters,
               const std::vector<ParameterGroup>& groups, ProcessGroup& world,
               const zero::ZeroOptions& options, const std::string& optimizer,
               const OptimizerOptions& optimizer_options);

  /// The next backward is the last one of its step, or not; its loss was
  /// multiplied by `loss_scale`.
  void begin_backward(bool is_last, double loss_scale = 1);
  /// Stage 0: sums the gradients. ZeRO has done so during backward.
  void reduce();
  /// The norm of the whole gradient, each element counted once, without the loss
  /// scale. Infinite or not a number on all ranks if any gradient is.
  double norm();
  /// Clips, updates, and forgets the gradients. With f16 parameters and a norm
  /// that is not finite it leaves the update out, of experts as well, and
  /// returns false.
  bool apply(double norm);

  /// The dense parameters' optimizer, whose rate holds for all.
  Optimizer& optimizer();
  std::int64_t num_skipped_steps() const { return num_skipped_; }
  /// Bytes that this rank sends when a checkpoint has been loaded, or a step has
  /// updated shards.
  double publish_bytes() const;
  /// This rank's parts. Stage 0 adds `more` tensors: buffers.
  TrainingState state(const std::vector<NamedTensor>& more = {});

 private:
  struct Part {
    ParameterGroup group;
    std::vector<NamedTensor> parameters;
    Tensors tensors;  ///< the same
    std::unique_ptr<ParameterSubset> module;
    std::unique_ptr<zero::ZeroOptimizer> zero;
    bool counts(const std::string& name) const {
      return !group.counts || group.counts(name);
    }
  };
  /// The factor of these gradients beyond 1 / dp of their sum.
  double scale_of(const Part& part) const;
  std::vector<zero::ZeroOptimizer*> zeros() const;

  ProcessGroup& world_;
  const zero::ZeroOptions options_;
  const int dp_;
  double loss_scale_ = 1;
  bool has_f16_ = false;
  std::int64_t num_skipped_ = 0;
  std::vector<Part> parts_;
  std::vector<NamedTensor> parameters_;
  Tensors counted_;  ///< stage 0: this rank's terms of the norm
  std::unique_ptr<Optimizer> optimizer_;  ///< stage 0
};

}  // namespace shardbook::moe
