// The memory that ZeRO holds, and the time of a step on the cluster `textbook`.

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/03_zero_fsdp/zero_fsdp_step_time.h"

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
    step.layers.push_back(
        {gather(full_bytes(*unit)),
         textbook::reduce_scatter(ranks, reduced_bytes(*unit))});
  }
  step.root = step.layers[0];
  step.layers.erase(step.layers.begin());
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
      model.layer_forward >= step.layers[0].gather &&
      model.layer_backward >= step.layers[0].gather + step.layers[0].reduce;
  if (!is_even || options_.max_live_parameters < all ||
      (step.gathers_layers_again && ahead > units_[1]->numel && !hides)) {
    return kNotPredicted;
  }
  // Parameters that stay whole are gathered after the update
  return zero_fsdp::step_s(step, static_cast<double>(micro_steps),
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
