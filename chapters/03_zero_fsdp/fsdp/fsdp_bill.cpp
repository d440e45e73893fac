#include "chapters/03_zero_fsdp/fsdp/fsdp_bill.h"

#include "chapters/03_zero_fsdp/zero_fsdp_step_time.h"

namespace shardbook::fsdp {
namespace {

bool is_zero3(const FsdpOptions& options) {
  return options.sharding_strategy == ShardingStrategy::kFullShard ||
         options.sharding_strategy == ShardingStrategy::kHybridShard;
}

}  // namespace

double predicted_bytes(const FullyShardedDataParallel& fsdp,
                       const StepPlan& plan) {
  const auto steps = static_cast<double>(plan.steps);
  const auto micro = static_cast<double>(plan.micro_steps);
  const double reductions = plan.no_sync ? 1 : micro;
  double total = 0, p = 1;
  const auto units = fsdp.units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    const FlatParameter& unit = *units[i];
    p = static_cast<double>(unit.ranks());
    // Forward and backward; the root (and SHARD_GRAD_OP) stays whole
    const bool is_root = i == 0 && fsdp.root_has_parameters();
    const double gathers = unit.ranks() == 1                      ? 0
                           : is_zero3(fsdp.options()) && !is_root ? 2
                                                                  : 1;
    total +=
        micro * gathers * (p - 1) / p * static_cast<double>(unit.full_bytes());
    // Gradients, in the shards' group and then among the replicas
    const auto message = static_cast<double>(unit.message_bytes());
    total += reductions * (p - 1) / p * message;
    if (unit.groups().replicas != nullptr) {
      const double r = unit.groups().replicas->size();
      total += reductions * 2 * (r - 1) / r * message / p;
    }
  }
  return steps * (total + 2 * (p - 1) / p * 8);
}

MemoryBill states_bill(const Options& options,
                       const FullyShardedDataParallel& fsdp) {
  double state = 0;
  MemoryBill bill;
  bill.bytes.fill(0);
  const double states = optimizer_states(options);
  const double stat = options.dtype == DType::kF64 ? 8 : 4;
  for (const FlatParameter* unit : fsdp.units()) {
    if (unit->is_on_host()) continue;
    bill[MemoryKind::kParameter] += static_cast<double>(unit->shard_bytes());
    bill[MemoryKind::kGradient] +=
        static_cast<double>(unit->shard_grad_bytes());
  }
  for (const Tensor& shard : fsdp.parameters()) {
    if (shard.device() == RankContext::current().device) {
      state += states * stat * static_cast<double>(shard.numel());
    }
  }
  bill[MemoryKind::kOptimizerState] = state;
  if (options.steps == 0) {
    bill[MemoryKind::kGradient] = bill[MemoryKind::kOptimizerState] = 0;
  }
  return bill;
}

double step_s(const FullyShardedDataParallel& fsdp, const StepPlan& plan,
              const textbook::ModelTimes& model) {
  const FsdpOptions& options = fsdp.options();
  const auto units = fsdp.units();
  const bool has_layers = units.size() == 1 ||
                          static_cast<double>(units.size()) == model.layers + 1;
  const bool keeps =
      options.sharding_strategy == ShardingStrategy::kShardGradOp;
  if ((options.sharding_strategy != ShardingStrategy::kFullShard && !keeps) ||
      options.cpu_offload.offload_params || options.forward_prefetch ||
      (plan.no_sync && plan.micro_steps > 1) || !has_layers ||
      !fsdp.root_has_parameters()) {
    return kNotPredicted;
  }
  zero_fsdp::ShardedStep step;
  step.model = model;
  step.gathers_layers_again = !keeps;
  step.prefetches_backward =
      options.backward_prefetch != BackwardPrefetch::kNone;
  const auto ranks = static_cast<double>(units[0]->ranks());
  for (const FlatParameter* unit : units) {
    step.layers.push_back(
        {textbook::all_gather(ranks, static_cast<double>(unit->full_bytes())),
         textbook::reduce_scatter(ranks,
                                  static_cast<double>(unit->message_bytes()))});
  }
  step.root = step.layers[0];
  step.layers.erase(step.layers.begin());
  // The loss, and then the norm
  const double sum = textbook::all_reduce(ranks, 8);
  return zero_fsdp::step_s(step, static_cast<double>(plan.micro_steps), sum) +
         sum;
}

}  // namespace shardbook::fsdp
