#include "chapters/planner/confirm.h"

#include <algorithm>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/planner/on_shapes.h"
#include "comm/device_mesh.h"

namespace shardbook::planner {

bool can_confirm(const PlanRequest& request, const Plan& plan) {
  if (plan.offloads) return false;
  // ZeRO-2 and -3, and rings of unlike ranks, run every rank
  constexpr int kMostFibers = 64;
  const int different = plan.setup.zero_stage >= 2
                            ? request.world_size / plan.setup.tp
                            : plan.setup.pp * plan.setup.cp;
  return different <= kMostFibers;
}

void confirm(const PlanRequest& request, Prediction& prediction) {
  if (!can_confirm(request, prediction.plan)) return;
  const Options options = options_of(request);
  hybrid::HybridOptions setup = chapter_options(request, prediction.plan);
  hybrid::check_legal(options, setup);
  const Report report = train_on_shapes(
      options, hybrid::fold_class(options, setup),
      [&](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, hybrid::topology_of(setup));
        run.train(options, *hybrid::make_strategy(options, setup, mesh));
      });
  prediction.confirmed_s = report.time.step_s;
  for (const RankReport& rank : report.ranks) {
    prediction.confirmed_bytes =
        std::max(prediction.confirmed_bytes, rank.peak_total.counted);
  }
}

}  // namespace shardbook::planner
