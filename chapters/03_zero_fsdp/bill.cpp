#include "chapters/03_zero_fsdp/bill.h"

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"

namespace shardbook::zero_fsdp {
namespace {

// --- The time of a step on the cluster `textbook` ---
//
//   forward    gather | gather  | gather  |
//                     | layer 1 | layer 2 | layer 3 | head
//   backward     gather | gather  | scatter, gather | scatter | scatter
//                head   | layer 3 | layer 2         | layer 1 |
//
// A layer computes while the next one is gathered; in backward, the gradients of
// the layer before it travel first.

/// Seconds of the messages of a unit: its parameters, its gradients.
struct UnitMessages {
  double gather = 0, reduce = 0;
};

/// The times of a micro-step.
struct ShardedStep {
  textbook::ModelTimes model;
  /// The root, then layers in the order of forward. Without layers, the root has
  /// all parameters.
  std::vector<UnitMessages> units;
  bool prefetches_forward = true, prefetches_backward = true;
  /// Whether units are gathered again for backward.
  bool gathers_root_again = false, gathers_layers_again = true;
  /// A layer ends when the gradients of the one before it have arrived.
  bool waits_for_gradients = false;
};

/// Seconds of computation and messages, overlapped or in turn.
double both(bool at_once, double computes, double travels) {
  return at_once ? std::max(computes, travels) : computes + travels;
}

/// After its forward, the all-reduce of the loss needs `loss_s`.
double micro_step_s(const ShardedStep& step, double loss_s) {
  const textbook::ModelTimes& model = step.model;
  const UnitMessages& root = step.units[0];
  const std::vector<UnitMessages> layers(step.units.begin() + 1,
                                         step.units.end());
  const std::size_t n = layers.size();
  // The root's gradients leave last
  if (n == 0) {
    return root.gather + model.forward() + std::max(model.backward(), loss_s) +
           root.reduce;
  }
  // Forward: the root's parameters, and the first layer's
  double seconds = root.gather + std::max(model.embedding, layers[0].gather);
  for (std::size_t i = 0; i < n; ++i) {
    seconds += both(step.prefetches_forward, model.layer_forward,
                    i + 1 < n ? layers[i + 1].gather : 0);
  }
  seconds += model.head;

  // Backward begins with the head, while the last layer is gathered
  const double head = model.head_backward;
  double begins = 0;
  if (step.gathers_root_again) begins = loss_s + root.gather;
  if (!step.gathers_layers_again) {
    // Only gradients travel
    double sent = std::max(loss_s, begins), computed = begins + head;
    for (std::size_t i = n; i-- > 0;) {
      computed += model.layer_backward;
      if (step.waits_for_gradients && i + 1 < n) {
        computed = std::max(computed, sent);
      }
      sent = std::max(sent, computed) + layers[i].reduce;
    }
    return seconds + std::max(sent, computed + model.embedding_backward) +
           root.reduce;
  }
  const double last = layers[n - 1].gather;
  seconds += step.gathers_root_again
                 ? begins + both(step.prefetches_backward, head, last)
                 : std::max(head, loss_s + last);
  for (std::size_t i = n; i-- > 0;) {
    const double before = i + 1 < n ? layers[i + 1].reduce : 0;
    const double next = i > 0 ? layers[i - 1].gather : 0;
    seconds +=
        both(step.prefetches_backward, model.layer_backward, before + next);
  }
  return seconds + std::max(layers[0].reduce, model.embedding_backward) +
         root.reduce;
}

/// Seconds of several micro-steps. After the last forward, the all-reduce of
/// the loss needs `loss_s`.
double seconds_of(const ShardedStep& step, double micro_steps, double loss_s) {
  return (micro_steps - 1) * micro_step_s(step, 0) + micro_step_s(step, loss_s);
}

}  // namespace

// --- FSDP ---

double predicted_bytes(const fsdp::FullyShardedDataParallel& fsdp,
                       const StepPlan& plan) {
  const auto steps = static_cast<double>(plan.steps);
  const auto micro = static_cast<double>(plan.micro_steps);
  const double reductions = plan.no_sync ? 1 : micro;
  double total = 0, p = 1;
  const auto units = fsdp.units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    const fsdp::FlatParameter& unit = *units[i];
    p = static_cast<double>(unit.ranks());
    // Forward and backward; the root (and SHARD_GRAD_OP) stays whole
    const bool is_root = i == 0 && fsdp.root_has_parameters();
    const double gathers = unit.ranks() == 1                            ? 0
                           : fsdp.options().gathers_again() && !is_root ? 2
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
                       const fsdp::FullyShardedDataParallel& fsdp) {
  MemoryBill bill;
  bill.bytes.fill(0);
  const double state =
      optimizer_states(options) * (options.dtype == DType::kF64 ? 8 : 4);
  for (const fsdp::FlatParameter* unit : fsdp.units()) {
    if (unit->is_on_host()) continue;
    bill[MemoryKind::kParameter] += static_cast<double>(unit->shard().bytes());
    bill[MemoryKind::kGradient] +=
        static_cast<double>(unit->shard_grad_bytes());
    for (const NamedTensor& each : unit->trained()) {
      bill[MemoryKind::kOptimizerState] +=
          state * static_cast<double>(each.tensor.numel());
    }
  }
  if (options.steps == 0) {
    bill[MemoryKind::kGradient] = bill[MemoryKind::kOptimizerState] = 0;
  }
  return bill;
}

double step_s(const fsdp::FullyShardedDataParallel& fsdp, const StepPlan& plan,
              const textbook::ModelTimes& model) {
  const fsdp::FsdpOptions& options = fsdp.options();
  const auto units = fsdp.units();
  const bool has_layers = units.size() == 1 ||
                          static_cast<double>(units.size()) == model.layers + 1;
  const bool keeps =
      options.sharding_strategy == fsdp::ShardingStrategy::kShardGradOp;
  if ((options.sharding_strategy != fsdp::ShardingStrategy::kFullShard &&
       !keeps) ||
      options.cpu_offload.offload_params || options.forward_prefetch ||
      (plan.no_sync && plan.micro_steps > 1) || !has_layers ||
      !fsdp.root_has_parameters()) {
    return kNotPredicted;
  }
  ShardedStep step;
  step.model = model;
  step.gathers_layers_again = !keeps;
  step.prefetches_backward =
      options.backward_prefetch != fsdp::BackwardPrefetch::kNone;
  const auto ranks = static_cast<double>(units[0]->ranks());
  for (const fsdp::FlatParameter* unit : units) {
    step.units.push_back(
        {textbook::all_gather(ranks, static_cast<double>(unit->full_bytes())),
         textbook::reduce_scatter(ranks,
                                  static_cast<double>(unit->message_bytes()))});
  }
  // The loss, and then the norm
  const double sum = textbook::all_reduce(ranks, 8);
  return seconds_of(step, static_cast<double>(plan.micro_steps), sum) + sum;
}

}  // namespace shardbook::zero_fsdp

// --- ZeRO ---

namespace shardbook::zero {

MemoryBill zero_bill(const ZeroOptimizer& zero, const Options& options,
                     const ModelConfig& config, std::int64_t rows,
                     bool recompute) {
  const int stage = zero.options().stage;
  const bool is_offloaded = zero.options().offload_optimizer;
  const StateBytes bytes =
      state_bytes(options.dtype, options.optimizer, options.optimizer_options);
  // A shard of gradients may be wider than gradients are
  const double shard_gradient = zero.options().accumulate_f32
                                    ? std::max(bytes.gradient, 4.0)
                                    : bytes.gradient;
  const auto shard = static_cast<double>(zero.shard_numel());
  const double whole = shard * zero.group().size();
  MemoryBill bill = single_device_bill(options, config, rows, recompute);
  const bool trains = options.steps > 0;
  const bool has_updates = options.steps > zero.num_skipped_steps();
  const bool is_resumed = options.first_step > 0;

  // f32 copies of 16-bit weights exist from the beginning, the rest from the
  // first update, or from a checkpoint if steps follow
  const bool has_state = has_updates || (trains && is_resumed);
  const double masters = dtype_bytes(options.dtype) == 2 ? 4 : 0;
  bill[MemoryKind::kOptimizerState] =
      is_offloaded ? 0 : shard * (has_state ? bytes.optimizer : masters);
  // In stage 3, small parameters stay gathered
  const double sliced =
      zero.options().offload_parameters ? 0 : shard * bytes.parameter;
  bill[MemoryKind::kParameter] =
      stage == 3 ? sliced + zero.published_bytes() : whole * bytes.parameter;
  // Stage 1 keeps all gradients, later stages a shard
  bill[MemoryKind::kGradient] = !has_updates   ? 0
                                : stage == 1   ? whole * bytes.gradient
                                : is_offloaded ? 0
                                               : shard * shard_gradient;
  return bill;
}

// Stage 1 reduces once per step, stage 2 in every micro-step; then all ranks
// gather the new parameters.
double ZeroStage12::time_of(const textbook::ModelTimes& model, std::int64_t,
                            std::int64_t micro_steps, const Sums& sums) const {
  const double ranks = group_.size();
  const auto micro = static_cast<double>(micro_steps);
  if (buckets_.size() > 1 || !options_.allgather_partitions ||
      groups_[0].layout.full_numel() > options_.allgather_bucket_size) {
    return kNotPredicted;
  }
  const double bucket = wire_bytes_of(buckets_[0]);
  const double reduce = options_.reduce_scatter
                            ? textbook::reduce_scatter(ranks, bucket)
                            : textbook::all_reduce(ranks, bucket);
  // The loss travels during the last backward; the norm overlaps with nothing
  return micro * model.forward() + (micro - 1) * model.backward() +
         std::max(model.backward(), sums.loss_s) +
         (options_.stage == 1 ? 1 : micro) * reduce + sums.norm_s +
         textbook::all_gather(ranks, published_bytes());
}

double ZeroStage3::time_of(const textbook::ModelTimes& model,
                           std::int64_t steps, std::int64_t micro_steps,
                           const Sums& sums) const {
  const double ranks = group_.size();
  const std::vector<int> gathers = later_gathers();
  // The first step records the order
  if (steps < 2 || !options_.overlap_comm ||
      static_cast<double>(units_.size()) != model.layers + 1) {
    return kNotPredicted;
  }
  zero_fsdp::ShardedStep step;
  step.model = model;
  const auto gather = [&](double bytes) {
    return bytes == 0 ? 0 : textbook::all_gather(ranks, bytes);
  };
  std::int64_t all = 0;
  for (const auto& unit : units_) {
    all += unit->numel;
    step.units.push_back(
        {gather(full_bytes(*unit)),
         textbook::reduce_scatter(ranks, reduced_bytes(*unit))});
  }
  // Layers are all kept, or all gathered again
  const std::int64_t ahead = options_.prefetch_bucket_size;
  step.gathers_root_again = gathers[0] > 1;
  step.gathers_layers_again = gathers[1] > 1;
  step.waits_for_gradients = true;
  step.prefetches_forward = step.prefetches_backward = ahead > 0;
  const bool is_even =
      std::all_of(gathers.begin() + 1, gathers.end(),
                  [&](int each) { return each == gathers[1]; });
  // Gathering further ahead changes backward if messages are not hidden
  const bool hides =
      model.layer_forward >= step.units[1].gather &&
      model.layer_backward >= step.units[1].gather + step.units[1].reduce;
  if (!is_even || options_.max_live_parameters < all ||
      (step.gathers_layers_again && ahead > units_[1]->numel && !hides)) {
    return kNotPredicted;
  }
  // Parameters that stay whole are gathered after the update
  return zero_fsdp::seconds_of(step, static_cast<double>(micro_steps),
                               sums.loss_s) +
         sums.norm_s + gather(published_bytes());
}

double ZeroOptimizer::step_s(const textbook::ModelTimes& model,
                             std::int64_t steps, std::int64_t micro_steps,
                             std::optional<Sums> sums) const {
  if (options_.offload_optimizer) return kNotPredicted;
  const double sum = textbook::all_reduce(group_.size(), 8);
  return time_of(model, steps, micro_steps, sums.value_or(Sums{sum, sum}));
}

}  // namespace shardbook::zero
