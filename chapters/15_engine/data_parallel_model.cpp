// Stage 0 is the DDP chapter's library, stages 1 to 3 are the ZeRO chapter's.
// Modules with experts are in expert_model.cpp.

#include "chapters/15_engine/internal/data_parallel_model.h"

#include <cmath>

#include "chapters/02_ddp/bill.h"
#include "chapters/02_ddp/ddp.h"
#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/models/checkpoint.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::engine::internal {
namespace {

bool has_f16(Module& module) {
  for (const Tensor& parameter : module.parameters()) {
    if (parameter.dtype() == DType::kF16) return true;
  }
  return false;
}

/// The norm over all ranks of `world` of gradients in parts. Elements that
/// several ranks of the model group hold count on the first of them.
double norm_over_ranks(const std::vector<NamedTensor>& gradients,
                       const Mpu& mpu, bool counts_here, ProcessGroup& world) {
  double total = 0;
  for (const NamedTensor& each : gradients) {
    // All ranks sum these squares, even those that do not count, so that all
    // take equally long
    const double squares = sum_of_squares(each.tensor);
    if (counts_here &&
        is_first_holder(mpu.layout, each.name, mpu.model->rank())) {
      total += squares;
    }
  }
  return std::sqrt(sum_over_ranks(world, total, "norm"));
}

// --- Stage 0 -----------------------------------------------------------------

class Replicated : public DataParallelModel {
 public:
  Replicated(Module& module, const DeepSpeedConfig& config, const Mpu& mpu,
             ProcessGroup& world)
      : DataParallelModel(module, config, mpu, world),
        is_f16_(has_f16(module)),
        ddp_(module, dp_),
        optimizer_(make_optimizer(config.optimizer.name(),
                                  trained_parameters(module),
                                  config.optimizer.params)) {
    optimizer_->keep_master_copies();
    const double before = config.prescale_gradients
                              ? dp_.size()
                              : config.gradient_predivide_factor;
    ddp_.register_comm_hook(ddp::predivide_hook(before, config.wire()));
  }

  Tensor forward(const Tensor& inputs, bool reduces) override {
    std::optional<ddp::NoSync> no_sync;
    if (!reduces) no_sync.emplace(ddp_);
    return ddp_(inputs);
  }
  void before_backward(bool, double, double) override {}

  double update(double loss_scale) override {
    const PhaseScope phase(Phase::kOptimizer);
    const double norm = this->norm() / loss_scale;
    if (!is_f16_ || std::isfinite(norm)) {
      double factor = 1 / loss_scale;
      const double most = config_.gradient_clipping;
      if (most > 0) factor *= clip_factor(norm, most);
      optimizer_->step(factor);
    }
    for (const Tensor& each : optimizer_->parameters()) each.clear_grad();
    return norm;
  }

  Optimizer& optimizer() override { return *optimizer_; }
  std::vector<NamedTensor> full_state() override {
    if (dp_.rank() != 0) return {};
    return state_of(module_);
  }
  TrainingState state() override {
    TrainingState state;
    add_whole(state, state_of(module_), *optimizer_);
    return state;
  }

  Bill bill(const Options& options, const ModelConfig& config,
            std::int64_t rows, std::int64_t micro_steps,
            std::int64_t skipped) const override {
    const int num_ranks = dp_.size();
    const auto wire = config_.wire();
    const bool recomputes = config_.book.recompute == "blocks";
    const ddp::BillSizes sizes = ddp::bill_sizes(
        module_, ddp_.options(), num_ranks, options.steps, wire);
    Bill bill;
    bill.bytes = ddp::predicted_bytes(sizes);
    bill.memory = single_device_bill(options, config, rows, recomputes);
    // The first update creates the optimizer's state; masters exist before it
    if (skipped == options.steps) {
      bill.memory[MemoryKind::kGradient] = 0;
      bill.memory[MemoryKind::kOptimizerState] = 0;
    }
    if (dtype_bytes(options.dtype) == 2) {
      bill.memory[MemoryKind::kOptimizerState] += 4 * sizes.elements;
    }
    ddp::StepTime step{config};
    step.ranks = num_ranks;
    step.micro_batches = static_cast<double>(micro_steps);
    step.rows = static_cast<double>(rows);
    step.wire_bytes =
        static_cast<double>(dtype_bytes(wire.value_or(options.dtype)));
    step.recompute = recomputes;
    bill.step_s = ddp::step_s(options, step, module_, ddp_);
    return bill;
  }

 private:
  double norm() {
    if (mpu_.model == nullptr) return grad_norm(optimizer_->parameters());
    std::vector<NamedTensor> gradients;
    for (const NamedTensor& each : module_.named_parameters()) {
      if (!each.tensor.requires_grad()) continue;
      gradients.push_back({each.name, each.tensor.grad()});
    }
    return norm_over_ranks(gradients, mpu_, mpu_.data->rank() == 0, world_);
  }

  const bool is_f16_;
  ddp::DistributedDataParallel ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

// --- Stages 1, 2 and 3 ---------------------------------------------------------

}  // namespace

zero::ZeroOptions zero_options(const DeepSpeedConfig& config, Module& module) {
  zero::ZeroOptions options = config.zero;
  // 0 means one gradient at a time, and the default limit for gathers
  options.reduce_bucket_size =
      std::max<std::int64_t>(1, options.reduce_bucket_size);
  const auto default_of = [&](std::int64_t zero::ZeroOptions::*size) {
    if (options.*size == 0) options.*size = default_zero().*size;
  };
  default_of(&zero::ZeroOptions::allgather_bucket_size);
  default_of(&zero::ZeroOptions::sub_group_size);
  options.overlap_comm = config.overlaps();
  // Keys choose where an all-reduce divides; a reduce-scatter divides first
  const bool sums_all = options.stage <= 2 && !options.reduce_scatter;
  if (sums_all && !config.prescale_gradients) {
    options.divide_before = config.gradient_predivide_factor;
  }
  options.wire = config.wire();
  options.accumulate_f32 =
      options.stage >= 2 && config.grad_accum_dtype == "fp32";
  options.clip = config.gradient_clipping;
  options.master_copies = !config.fp16.fp16_master_weights_and_grads;
  // Blocks are fetched as a whole, where there are any
  bool has_blocks = false;
  for (const NamedModule& each : module.named_modules()) {
    has_blocks = has_blocks || each.module->type_name() == "GptBlock";
  }
  if (!has_blocks) options.unit_types = {"Linear"};
  return options;
}

namespace {

class Sharded : public DataParallelModel {
 public:
  Sharded(Module& module, const DeepSpeedConfig& config, const Mpu& mpu,
          ProcessGroup& world)
      : DataParallelModel(module, config, mpu, world),
        zero_(zero::make_zero(module, dp_, zero_options(config, module),
                              config.optimizer.name(),
                              config.optimizer.params)) {}

  Tensor forward(const Tensor& inputs, bool) override {
    return (*zero_)(inputs);
  }
  void before_backward(bool reduces, double loss_scale, double) override {
    zero_->set_boundary(reduces);
    zero_->set_loss_scale(loss_scale);
  }
  double update(double loss_scale) override {
    if (mpu_.model == nullptr) return zero_->step();
    const PhaseScope phase(Phase::kOptimizer);
    const NoGrad no_grad;
    const double norm =
        norm_over_ranks(zero_->own_gradients(), mpu_, true, world_);
    return zero_->step(norm / loss_scale);
  }

  Optimizer& optimizer() override { return zero_->optimizer(); }
  std::vector<NamedTensor> full_state() override {
    return zero_->full_parameters(/*rank0_only=*/true);
  }
  TrainingState state() override { return zero_->state(); }

  Bill bill(const Options& options, const ModelConfig& config,
            std::int64_t rows, std::int64_t micro_steps,
            std::int64_t skipped) const override {
    Bill bill;
    const bool recomputes = config_.book.recompute == "blocks";
    // A skipped step publishes nothing, a loaded checkpoint once
    const std::int64_t published = (options.first_step > 0 ? 1 : 0) - skipped;
    bill.bytes = zero_->predicted_bytes(options.steps, micro_steps) +
                 static_cast<double>(published) * zero_->predicted_load_bytes();
    bill.memory = zero::zero_bill(*zero_, options, config, rows, recomputes);
    if (textbook::has_model_times(options, config)) {
      const auto model = textbook::model_times(
          options, config, static_cast<double>(rows), recomputes);
      bill.step_s = zero_->step_s(model, options.steps, micro_steps);
    }
    return bill;
  }

 private:
  std::unique_ptr<zero::ZeroOptimizer> zero_;
};

}  // namespace

std::unique_ptr<DataParallelModel> make_model(Module& module,
                                              const DeepSpeedConfig& config,
                                              const Mpu& mpu,
                                              ProcessGroup& world) {
  if (has_experts(module)) return make_expert_model(module, config, mpu, world);
  if (config.zero.stage == 0) {
    return std::make_unique<Replicated>(module, config, mpu, world);
  }
  return std::make_unique<Sharded>(module, config, mpu, world);
}

Tensors trained_parameters(Module& module) {
  Tensors trained;
  for (const Tensor& each : module.parameters()) {
    if (each.requires_grad()) trained.push_back(each);
  }
  return trained;
}

void cast(Module& module, DType dtype) {
  const NoGrad no_grad;
  module.replace_tensors([&](const std::string&, const Tensor& tensor) {
    if (tensor.dtype() == dtype || !is_floating(tensor.dtype())) return tensor;
    const MemoryScope kind(MemoryKind::kParameter);
    const Tensor result = to_dtype(tensor, dtype);
    if (tensor.requires_grad()) result.set_requires_grad();
    return result;
  });
}

}  // namespace shardbook::engine::internal
