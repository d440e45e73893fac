#pragma once

// Optimizers, learning-rate schedules, clipping.
//
// The formulas are PyTorch's, in PyTorch's order of operations. State belongs
// to flat slices: a chapter that shards it makes an optimizer over slices of
// its own.
//
//   auto optimizer = make_optimizer("adamw", model.parameters(), options);
//   loss.backward();
//   clip_grad_norm(model.parameters(), 1.0);
//   optimizer->step();
//   model.clear_grad();

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/module.h"
#include "core/tensor.h"

namespace shardbook {

struct OptimizerOptions {
  double lr = 1e-3;
  double weight_decay = 0;
  // SGD
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  // Adam, AdamW
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

/// The state that an optimizer keeps for one parameter (or slice).
struct OptimizerSlot {
  std::int64_t step = 0;
  /// SGD: momentum. Adam: first and second moment. Flat, in f32 (f64 for f64).
  Tensors state;
  /// Optional f32 [n] copy that the update works on; the parameter becomes its
  /// rounding (mixed precision).
  Tensor master;
};

class Optimizer {
 public:
  Optimizer(Tensors parameters, const OptimizerOptions& options);
  virtual ~Optimizer() = default;

  /// Updates every parameter that has a gradient; the others stay untouched,
  /// state included. Gradients are multiplied by `grad_scale`.
  void step(double grad_scale = 1);
  /// The same for parameter `index` with a gradient given here. Then notes its
  /// device's parameters, gradients and optimizer state as held
  /// (Device::note_held).
  void step_one(std::size_t index, const Tensor& grad, double grad_scale = 1);

  const Tensors& parameters() const { return parameters_; }
  std::vector<OptimizerSlot>& slots() { return slots_; }
  OptimizerOptions& options() { return options_; }
  const OptimizerOptions& options() const { return options_; }
  void set_lr(double lr) { options_.lr = lr; }
  /// Keeps an f32 master copy of every 16-bit parameter.
  void keep_master_copies();
  /// The state tensors that each parameter has, by name: "exp_avg", ...
  virtual std::vector<std::string> state_names() const = 0;

 protected:
  virtual void update(const Tensor& parameter, const Tensor& grad,
                      double grad_scale, OptimizerSlot& slot) = 0;

 private:
  Tensors parameters_;
  std::vector<OptimizerSlot> slots_;
  OptimizerOptions options_;
};

/// "sgd", "adam" or "adamw"; another name throws Error.
std::unique_ptr<Optimizer> make_optimizer(const std::string& name,
                                          Tensors parameters,
                                          const OptimizerOptions& options);

/// Learning rate as a factor of the base rate, by number of steps done.
using LrSchedule = std::function<double(std::int64_t step)>;
/// "constant", "linear" or "cosine": rises linearly over `warmup` steps, then
/// stays, or falls to `floor` by `total` along a line or half a cosine.
LrSchedule make_schedule(const std::string& name, std::int64_t warmup,
                         std::int64_t total, double floor = 0);

/// Square root of the sum of squares over all gradients; added in f64.
double grad_norm(const Tensors& parameters);
/// The factor that brings gradients of this norm to at most max_norm:
/// max_norm / (norm + 1e-6) where that is below 1, else 1.
double clip_factor(double norm, double max_norm);
/// Scales all gradients by clip_factor for their known norm.
void clip_gradients(const Tensors& parameters, double norm, double max_norm);
/// The same, and returns the norm before.
/// torch.nn.utils.clip_grad_norm_.
double clip_grad_norm(const Tensors& parameters, double max_norm);

}  // namespace shardbook
