#include "core/optim.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"
#include "core/context.h"
#include "core/inplace.h"
#include "core/internal/op_scope.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/optimizer.h"
#include "core/ops.h"

namespace shardbook {
namespace {

kernels::ParameterSlice slice_of(const Tensor& parameter, const Tensor& grad,
                                 double grad_scale, const Tensor& master) {
  kernels::ParameterSlice slice;
  slice.n = parameter.numel();
  slice.dtype = parameter.dtype();
  slice.param = parameter.raw();
  slice.grad_dtype = grad.dtype();
  slice.grad = grad.raw();
  slice.grad_scale = grad_scale;
  if (master.defined()) slice.master = master.data<float>();
  return slice;
}

class Sgd : public Optimizer {
 public:
  using Optimizer::Optimizer;
  std::vector<std::string> state_names() const override {
    if (options().momentum == 0) return {};
    return {"momentum_buffer"};
  }

 protected:
  void update(const Tensor& parameter, const Tensor& grad, double grad_scale,
              OptimizerSlot& slot) override {
    const OptimizerOptions& o = options();
    const kernels::SgdOptions options{o.lr, o.momentum, o.dampening,
                                      o.weight_decay, o.nesterov};
    internal::OpScope("sgd", 4 * internal::count(parameter),
                      internal::bytes_of({&parameter, &parameter, &grad}),
                      parameter)
        .run(kernels::sgd_step,
             slice_of(parameter, grad, grad_scale, slot.master), options,
             slot.state.empty() ? nullptr : slot.state[0].raw(),
             slot.step == 1);
  }
};

class Adam : public Optimizer {
 public:
  Adam(Tensors parameters, const OptimizerOptions& options, bool decoupled)
      : Optimizer(std::move(parameters), options), decoupled_(decoupled) {}
  std::vector<std::string> state_names() const override {
    return {"exp_avg", "exp_avg_sq"};
  }

 protected:
  void update(const Tensor& parameter, const Tensor& grad, double grad_scale,
              OptimizerSlot& slot) override {
    const OptimizerOptions& o = options();
    const Tensor &first = slot.state[0], &second = slot.state[1];
    const kernels::AdamOptions options{o.lr,  o.beta1,        o.beta2,
                                       o.eps, o.weight_decay, decoupled_};
    internal::OpScope(decoupled_ ? "adamw" : "adam",
                      12 * internal::count(parameter),
                      internal::bytes_of({&parameter, &parameter, &grad, &first,
                                          &first, &second, &second}),
                      parameter)
        .run(kernels::adam_step,
             slice_of(parameter, grad, grad_scale, slot.master), options,
             slot.step, first.raw(), second.raw());
  }

 private:
  bool decoupled_;
};

}  // namespace

Optimizer::Optimizer(Tensors parameters, const OptimizerOptions& options)
    : parameters_(std::move(parameters)),
      slots_(parameters_.size()),
      options_(options) {}

void Optimizer::keep_master_copies() {
  MemoryScope kind(MemoryKind::kOptimizerState);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const DType dtype = parameters_[i].dtype();
    if (dtype != DType::kBF16 && dtype != DType::kF16) continue;
    slots_[i].master = Tensor::empty(parameters_[i].shape(),
                                     {DType::kF32, parameters_[i].device()});
    slots_[i].master.copy_from(parameters_[i]);
  }
}

void Optimizer::step(double grad_scale) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor grad = parameters_[i].grad();
    if (grad.defined()) step_one(i, grad, grad_scale);
  }
}

void Optimizer::step_one(std::size_t index, const Tensor& grad,
                         double grad_scale) {
  const Tensor& parameter = parameters_[index];
  SB_CHECK(grad.numel() == parameter.numel(), "optimizer: a gradient of ",
           grad.numel(), " elements for a parameter of ", parameter.numel());
  PhaseScope phase(Phase::kOptimizer);
  OptimizerSlot& slot = slots_[index];
  while (slot.state.size() < state_names().size()) {
    MemoryScope kind(MemoryKind::kOptimizerState);
    slot.state.push_back(Tensor::zeros(
        {parameter.numel()},
        {internal::stat_dtype(parameter.dtype()), parameter.device()}));
  }
  slot.step += 1;
  // A shard may be empty.
  if (parameter.numel() > 0) update(parameter, grad, grad_scale, slot);
  for (const MemoryKind kind : {MemoryKind::kParameter, MemoryKind::kGradient,
                                MemoryKind::kOptimizerState}) {
    parameter.device().note_held(kind);
  }
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name,
                                          Tensors parameters,
                                          const OptimizerOptions& options) {
  if (name == "sgd") {
    return std::make_unique<Sgd>(std::move(parameters), options);
  }
  SB_CHECK(name == "adam" || name == "adamw", "optimizer '", name,
           "' is unknown; use sgd, adam or adamw");
  return std::make_unique<Adam>(std::move(parameters), options,
                                /*decoupled=*/name == "adamw");
}

LrSchedule make_schedule(const std::string& name, std::int64_t warmup,
                         std::int64_t total, double floor) {
  SB_CHECK(name == "constant" || name == "linear" || name == "cosine",
           "schedule '", name, "' is unknown; use constant, linear or cosine");
  return [=](std::int64_t step) {
    if (step < warmup) {
      return static_cast<double>(step + 1) / static_cast<double>(warmup);
    }
    if (name == "constant") return 1.0;
    // Share of the way from the end of the warm-up to `total`, 0 to 1
    const double progress =
        total <= warmup ? 1
                        : std::clamp(static_cast<double>(step - warmup) /
                                         static_cast<double>(total - warmup),
                                     0.0, 1.0);
    if (name == "linear") return floor + (1 - floor) * (1 - progress);
    return floor +
           (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
  };
}

double grad_norm(const Tensors& parameters) {
  PhaseScope phase(Phase::kOptimizer);
  double total = 0;
  for (const Tensor& parameter : parameters) {
    const Tensor grad = parameter.grad();
    if (grad.defined()) total += sum_of_squares(grad);
  }
  return std::sqrt(total);
}

double clip_factor(double norm, double max_norm) {
  return std::min(1.0, max_norm / (norm + 1e-6));
}

void clip_gradients(const Tensors& parameters, double norm, double max_norm) {
  const double factor = clip_factor(norm, max_norm);
  PhaseScope phase(Phase::kOptimizer);
  for (const Tensor& parameter : parameters) {
    const Tensor grad = parameter.grad();
    if (grad.defined()) scale_in_place(grad, factor);
  }
}

double clip_grad_norm(const Tensors& parameters, double max_norm) {
  const double norm = grad_norm(parameters);
  clip_gradients(parameters, norm, max_norm);
  return norm;
}

}  // namespace shardbook
