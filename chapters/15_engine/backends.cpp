// DDP, FSDP and the engine under an Accelerator. With DDP and FSDP a rank computes
// gradients by itself, and the wrapper averages them; the engine's config clips,
// and backward ends in the engine's step.

#include <cmath>
#include <limits>
#include <optional>

#include "chapters/03_zero_fsdp/fsdp/state_dict.h"
#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/internal/backend.h"
#include "chapters/15_engine/internal/data_parallel_model.h"
#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/loss_scaler.h"
#include "core/autograd.h"
#include "core/context.h"

namespace shardbook::accelerate::internal {
namespace {

/// PyTorch's GradScaler: halved by each overflow, doubled by 2000 good steps.
LossScaleOptions grad_scaler() {
  LossScaleOptions options;
  options.window = 2000;
  options.hysteresis = 1;
  options.kind = ScalerKind::kMegatron;
  return options;
}

/// DDP and FSDP.
class Local : public Updating {
 public:
  explicit Local(const Plan& plan)
      : Updating(plan,
                 plan.mixed_precision == "fp16"
                     ? std::optional(DynamicLossScaler(grad_scaler()))
                     : std::nullopt,
                 /*always_measures=*/false) {}

  void backward(const Tensor& loss) override {
    const double factor = scale() / static_cast<double>(plan_.accumulation);
    autograd::backward({loss},
                       {Tensor::full(loss.shape(), factor, loss.options())});
  }
  Optimizer& optimizer() override { return *optimizer_; }
  Module& module() override { return plan_.module; }
  ProcessGroup& data_group() override { return plan_.world; }

 protected:
  void make_optimizer_of(const Tensors& parameters) {
    optimizer_ = make_optimizer(plan_.optimizer.name(), parameters,
                                plan_.optimizer.params);
  }
  void apply(double factor) override { optimizer_->step(factor); }

  std::unique_ptr<Optimizer> optimizer_;
};

Module& in_dtype(const Plan& plan) {
  if (plan.mixed_precision != "no") {
    engine::internal::cast(plan.module, engine::dtype_of(plan.mixed_precision));
  }
  return plan.module;
}

class Ddp : public Local {
 public:
  Ddp(const Plan& plan, const DistributedDataParallelPlugin& plugin)
      : Local(plan), ddp_(in_dtype(plan), plan.world, plugin.options) {
    make_optimizer_of(parameters());
    optimizer_->keep_master_copies();
  }

  void begin_micro_step(bool syncs) override {
    if (!syncs) no_sync_.emplace(ddp_);
  }
  void end_micro_step() override { no_sync_.reset(); }
  Tensor forward(const Tensor& inputs) override { return ddp_(inputs); }
  void zero_grad() override { plan_.module.clear_grad(); }

  Tensors parameters() override {
    return engine::internal::trained_parameters(plan_.module);
  }
  std::vector<NamedTensor> full_state() override {
    if (plan_.world.rank() != 0) return {};
    return state_of(plan_.module);
  }

 protected:
  // Every rank has the whole average
  double norm() override { return grad_norm(optimizer_->parameters()); }
  TrainingState parts() override {
    TrainingState state;
    add_whole(state, state_of(plan_.module), *optimizer_);
    return state;
  }

 private:
  ddp::DistributedDataParallel ddp_;
  std::optional<ddp::NoSync> no_sync_;
};

class Fsdp : public Local {
 public:
  Fsdp(const Plan& plan, const FullyShardedDataParallelPlugin& plugin)
      : Local(plan),
        fsdp_(plan.module, plan.world,
              fsdp_options(plugin, plan.mixed_precision, plan.world.size())) {
    set_recompute(plan.module, plugin.activation_checkpointing);
    // The wrapper has replaced the model's tensors by shards
    make_optimizer_of(fsdp_.parameters());
  }

  void begin_micro_step(bool syncs) override {
    if (!syncs) no_sync_.emplace(fsdp_);
  }
  void end_micro_step() override { no_sync_.reset(); }
  Tensor forward(const Tensor& inputs) override { return fsdp_(inputs); }
  void zero_grad() override { fsdp_.clear_grad(); }
  Tensors parameters() override { return fsdp_.parameters(); }
  std::vector<NamedTensor> full_state() override {
    return fsdp::full_state_dict(fsdp_, {/*offload_to_cpu=*/true,
                                         /*rank0_only=*/true});
  }

 protected:
  double norm() override {
    return fsdp_.clip_grad_norm_(std::numeric_limits<double>::infinity());
  }
  TrainingState parts() override {
    return fsdp::training_state(fsdp_, *optimizer_);
  }

 private:
  fsdp::FullyShardedDataParallel fsdp_;
  std::optional<fsdp::NoSync> no_sync_;
};

}  // namespace

Tensor Backend::loss(const Batch& batch) {
  return language_loss(forward(batch.inputs), batch.targets);
}

// The optimizer applies the factor. Gradients keep the loss scale: without it,
// f16 gradients might vanish.
double Updating::clip(double max_norm) {
  measure();
  if (std::isfinite(*norm_)) factor_ = clip_factor(*norm_, max_norm);
  return *norm_;
}

void Updating::step() {
  const PhaseScope phase(Phase::kOptimizer);
  if (measures_) measure();
  was_skipped_ = measures_ && !std::isfinite(*norm_);
  if (was_skipped_) {
    forget();
  } else {
    apply(factor_ / scale());
  }
  if (scaler_) scaler_->update(was_skipped_);
  norm_.reset();
  factor_ = 1;
}

void Updating::measure() {
  if (!norm_) norm_ = norm() / scale();
}

TrainingState Updating::state() {
  TrainingState state = parts();
  if (scaler_) add_loss_scale(state, *scaler_);
  return state;
}

std::unique_ptr<Backend> make_ddp(const Plan& plan,
                                  const DistributedDataParallelPlugin& plugin) {
  return std::make_unique<Ddp>(plan, plugin);
}

std::unique_ptr<Backend> make_fsdp(
    const Plan& plan, const FullyShardedDataParallelPlugin& plugin) {
  return std::make_unique<Fsdp>(plan, plugin);
}

// --- The engine --------------------------------------------------------------

namespace {

class UnderEngine : public Backend {
 public:
  UnderEngine(const Plan& plan, const engine::DeepSpeedConfig& config) {
    engine::InitializeArgs args;
    if (!plan.optimizer.type.empty()) args.optimizer = plan.optimizer;
    engine_ = engine::initialize(plan.module, config, plan.world, args).engine;
    engine_->set_gradient_accumulation_boundary(true);
  }

  void begin_micro_step(bool syncs) override {
    engine_->set_gradient_accumulation_boundary(syncs);
  }
  void end_micro_step() override {
    engine_->set_gradient_accumulation_boundary(true);
  }
  Tensor forward(const Tensor& inputs) override { return (*engine_)(inputs); }
  // The engine divides by gradient_accumulation_steps, clips as its config
  // says, updates and forgets the gradients
  void backward(const Tensor& loss) override {
    engine_->backward(loss);
    engine_->step();
  }
  double clip(double) override { return engine_->get_global_grad_norm(); }
  void step() override {}
  void zero_grad() override {}
  bool was_skipped() const override { return !engine_->was_step_applied(); }

  Optimizer& optimizer() override { return engine_->optimizer(); }
  Tensors parameters() override { return engine_->module().parameters(); }
  Module& module() override { return engine_->module(); }
  ProcessGroup& data_group() override { return engine_->data_parallel_group(); }
  std::vector<NamedTensor> full_state() override {
    return engine_->full_state();
  }
  TrainingState state() override { return engine_->state(); }
  std::map<std::string, double> numbers() const override {
    return engine_->numbers();
  }
  void set_numbers(const std::map<std::string, double>& numbers) override {
    // Other plugins do not count them
    if (numbers.count("global_steps") > 0) engine_->set_numbers(numbers);
  }

 private:
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace

std::unique_ptr<Backend> make_engine(const Plan& plan,
                                     const engine::DeepSpeedConfig& config) {
  return std::make_unique<UnderEngine>(plan, config);
}

}  // namespace shardbook::accelerate::internal
