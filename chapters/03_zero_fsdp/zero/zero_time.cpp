#include "chapters/03_zero_fsdp/zero/zero_time.h"

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "chapters/03_zero_fsdp/zero_fsdp_step_time.h"
#include "chapters/common/run/report.h"

namespace shardbook::zero {
namespace {

// Stage 1 reduces once per step, stage 2 in every micro-step; then all ranks
// gather the new parameters.
double step_of_12(const ZeroStage12& zero, const textbook::ModelTimes& model,
                  double micro_steps, const Sums& sums) {
  const ZeroOptions& options = zero.options();
  const double ranks = zero.group().size();
  const std::vector<double> buckets = zero.bucket_bytes();
  const double parameters = zero.flat_bytes();
  if (buckets.size() > 1 || !options.allgather_partitions ||
      zero.layout(0).padded > options.allgather_bucket_size) {
    return kNotPredicted;
  }
  const double reduce = options.reduce_scatter
                            ? textbook::reduce_scatter(ranks, buckets[0])
                            : textbook::all_reduce(ranks, buckets[0]);
  // The loss travels during the last backward; the norm overlaps with nothing
  return micro_steps * model.forward() + (micro_steps - 1) * model.backward() +
         std::max(model.backward(), sums.loss_s) +
         (options.stage == 1 ? 1 : micro_steps) * reduce + sums.norm_s +
         textbook::all_gather(ranks, parameters);
}

double step_of_3(const ZeroStage3& zero, const textbook::ModelTimes& model,
                 std::int64_t steps, std::int64_t micro_steps,
                 const Sums& sums) {
  const ZeroOptions& options = zero.options();
  const double ranks = zero.group().size();
  const auto units = zero.unit_sizes();
  const std::vector<int> gathers = zero.later_gathers();
  // The first step records the order
  if (steps < 2 || !options.overlap_comm ||
      static_cast<double>(units.size()) != model.layers + 1) {
    return kNotPredicted;
  }
  zero_fsdp::ShardedStep step;
  step.model = model;
  const auto gather = [&](std::int64_t bytes) {
    return bytes == 0 ? 0
                      : textbook::all_gather(ranks, static_cast<double>(bytes));
  };
  std::int64_t all = 0;
  for (const auto& unit : units) {
    all += unit.full_elements;
    step.layers.push_back(
        {gather(unit.full_bytes),
         textbook::reduce_scatter(ranks,
                                  static_cast<double>(unit.reduced_bytes))});
  }
  step.root = step.layers[0];
  step.layers.erase(step.layers.begin());
  // Layers are all kept, or all gathered again
  const std::int64_t ahead = options.prefetch_bucket_size;
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
  if (!is_even || options.max_live_parameters < all ||
      (step.gathers_layers_again && ahead > units[1].full_elements && !hides)) {
    return kNotPredicted;
  }
  // Parameters that stay whole are gathered after the update
  return zero_fsdp::step_s(step, static_cast<double>(micro_steps),
                           sums.loss_s) +
         sums.norm_s + gather(zero.persistent_bytes());
}

}  // namespace

double step_s(const ZeroOptimizer& zero, const textbook::ModelTimes& model,
              std::int64_t steps, std::int64_t micro_steps, const Sums& sums) {
  if (zero.options().offload_optimizer) return kNotPredicted;
  if (const auto* sliced = dynamic_cast<const ZeroStage3*>(&zero)) {
    return step_of_3(*sliced, model, steps, micro_steps, sums);
  }
  return step_of_12(dynamic_cast<const ZeroStage12&>(zero), model,
                    static_cast<double>(micro_steps), sums);
}

double step_s(const ZeroOptimizer& zero, const textbook::ModelTimes& model,
              std::int64_t steps, std::int64_t micro_steps) {
  const double sum = textbook::all_reduce(zero.group().size(), 8);
  return step_s(zero, model, steps, micro_steps, {sum, sum});
}

}  // namespace shardbook::zero
