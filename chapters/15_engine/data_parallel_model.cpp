// Stage 0 is the DDP chapter's library, stages 1 to 3 are the ZeRO chapter's.
// Modules with experts are in expert_model.cpp.

#include "chapters/15_engine/internal/data_parallel_model.h"

#include <cmath>

#include "chapters/02_ddp/bill.h"
#include "chapters/02_ddp/ddp.h"
#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/03_zero_fsdp/zero/zero_time.h"
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
      : module_(module),
        mpu_(mpu),
        world_(world),
        clip_(config.gradient_clipping),
        wire_(config.wire()),
        is_f16_(has_f16(module)),
        recomputes_(config.book.recompute == "blocks"),
        num_ranks_((mpu.data != nullptr ? *mpu.data : world).size()),
        ddp_(module, mpu.data != nullptr ? *mpu.data : world),
        optimizer_(make_optimizer(config.optimizer.name(),
                                  trained_parameters(module),
                                  config.optimizer.params)) {
    optimizer_->keep_master_copies();
    const double before = config.prescale_gradients
                              ? num_ranks_
                              : config.gradient_predivide_factor;
    ddp_.register_comm_hook(ddp::predivide_hook(before, wire_));
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
      if (clip_ > 0) factor *= clip_factor(norm, clip_);
      optimizer_->step(factor);
    }
    for (const Tensor& each : optimizer_->parameters()) each.clear_grad();
    return norm;
  }

  Optimizer& optimizer() override { return *optimizer_; }
  Module& module() override { return module_; }
  ProcessGroup& group() override { return ddp_.group(); }
  std::vector<NamedTensor> full_state() override {
    if (group().rank() != 0) return {};
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
    const ddp::BillSizes sizes = ddp::bill_sizes(
        module_, ddp_.options(), num_ranks_, options.steps, wire_);
    Bill bill;
    bill.bytes = ddp::predicted_bytes(sizes);
    bill.memory = single_device_bill(options, config, rows, recomputes_);
    // The first update creates the optimizer's state; masters exist before it
    if (skipped == options.steps) {
      bill.memory[MemoryKind::kGradient] = 0;
      bill.memory[MemoryKind::kOptimizerState] = 0;
    }
    if (dtype_bytes(options.dtype) == 2) {
      bill.memory[MemoryKind::kOptimizerState] += 4 * sizes.elements;
    }
    ddp::StepTime step{config};
    step.ranks = num_ranks_;
    step.micro_batches = static_cast<double>(micro_steps);
    step.rows = static_cast<double>(rows);
    step.wire_bytes =
        static_cast<double>(dtype_bytes(wire_.value_or(options.dtype)));
    step.recompute = recomputes_;
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

  Module& module_;
  const Mpu mpu_;
  ProcessGroup& world_;
  const double clip_;
  const std::optional<DType> wire_;
  const bool is_f16_, recomputes_;
  const int num_ranks_;
  ddp::DistributedDataParallel ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

// --- Stages 1, 2 and 3 ---------------------------------------------------------

}  // namespace

zero::ZeroOptions zero_options(const DeepSpeedConfig& config, Module& module) {
  const ZeroConfig& from = config.zero;
  zero::ZeroOptions to;
  to.stage = from.stage;
  // 0 means one gradient at a time, and the default limit for gathers
  to.reduce_bucket_size = std::max<std::int64_t>(1, from.reduce_bucket_size);
  to.allgather_bucket_size = from.allgather_bucket_size > 0
                                 ? from.allgather_bucket_size
                                 : ZeroConfig().allgather_bucket_size;
  to.allgather_partitions = from.allgather_partitions;
  to.overlap_comm = from.overlaps();
  to.reduce_scatter = from.reduce_scatter;
  // Keys choose where an all-reduce divides; a reduce-scatter divides first
  const bool sums_all = from.stage <= 2 && !from.reduce_scatter;
  if (sums_all && !config.prescale_gradients) {
    to.divide_before = config.gradient_predivide_factor;
  }
  to.wire = config.wire();
  to.accumulate_f32 = from.stage >= 2 && config.grad_accum_dtype == "fp32";
  to.round_robin_gradients = from.round_robin_gradients;
  to.clip = config.gradient_clipping;
  to.offload_optimizer = from.offload_optimizer.device == "cpu";
  to.offload_parameters = from.offload_param.device == "cpu";
  to.master_copies = !config.fp16.fp16_master_weights_and_grads;
  to.persistence_threshold = from.stage3_param_persistence_threshold;
  to.prefetch_bucket_size = from.stage3_prefetch_bucket_size;
  to.sub_group_size = from.sub_group_size > 0 ? from.sub_group_size
                                              : ZeroConfig().sub_group_size;
  to.max_live_parameters = from.stage3_max_live_parameters;
  to.max_reuse_distance = from.stage3_max_reuse_distance;
  // Blocks are fetched as a whole, where there are any
  bool has_blocks = false;
  for (const NamedModule& each : module.named_modules()) {
    has_blocks = has_blocks || each.module->type_name() == "GptBlock";
  }
  if (!has_blocks) to.unit_types = {"Linear"};
  return to;
}

namespace {

class Sharded : public DataParallelModel {
 public:
  Sharded(Module& module, const DeepSpeedConfig& config, const Mpu& mpu,
          ProcessGroup& world)
      : mpu_(mpu),
        world_(world),
        recomputes_(config.book.recompute == "blocks"),
        zero_(zero::make_zero(module, mpu.data != nullptr ? *mpu.data : world,
                              zero_options(config, module),
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
  Module& module() override { return zero_->module(); }
  ProcessGroup& group() override { return zero_->group(); }
  std::vector<NamedTensor> full_state() override {
    return zero_->full_parameters(/*rank0_only=*/true);
  }
  TrainingState state() override { return zero_->state(); }

  Bill bill(const Options& options, const ModelConfig& config,
            std::int64_t rows, std::int64_t micro_steps,
            std::int64_t skipped) const override {
    Bill bill;
    // A skipped step publishes nothing, a loaded checkpoint once
    const std::int64_t published = (options.first_step > 0 ? 1 : 0) - skipped;
    bill.bytes = zero_->predicted_bytes(options.steps, micro_steps) +
                 static_cast<double>(published) * zero_->predicted_load_bytes();
    bill.memory = zero::zero_bill(*zero_, options, config, rows, recomputes_);
    if (textbook::has_model_times(options, config)) {
      const auto model = textbook::model_times(
          options, config, static_cast<double>(rows), recomputes_);
      bill.step_s = zero::step_s(*zero_, model, options.steps, micro_steps);
    }
    return bill;
  }

 private:
  const Mpu mpu_;
  ProcessGroup& world_;
  const bool recomputes_;
  std::unique_ptr<zero::ZeroOptimizer> zero_;
};

}  // namespace

std::unique_ptr<DataParallelModel> make_model(Module& module,
                                              const DeepSpeedConfig& config,
                                              const Mpu& mpu,
                                              ProcessGroup& world) {
  if (has_experts(module)) {
    return make_expert_model(module, config, mpu, world);
  }
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
