#include "chapters/14_hybrid_3d/batch_statistics.h"

#include "chapters/common/sharded/parts.h"
#include "core/context.h"
#include "core/layers.h"

namespace shardbook::hybrid {
namespace {

template <typename Fn>
void for_stages(PipelineModel& model, const Fn& fn) {
  for (int s = 0; s < model.layout().num_stages(); ++s) {
    if (model.holds(s)) fn(model.stage(s));
  }
}

/// The two ranks that hold the same stages, one for each direction. Models with
/// batch norms have no parameter in two stages, so no other ranks share one.
ProcessGroup* both_directions(const PipelineModel& model) {
  return model.shared().empty() ? nullptr : model.shared()[0].group.get();
}

}  // namespace

void commit_statistics(PipelineModel& model, ProcessGroup& replicas) {
  const PhaseScope phase(Phase::kOptimizer);
  Tensors pending;
  for_stages(model, [&](Stage& stage) {
    for (const Tensor& each : pending_statistics(stage)) {
      pending.push_back(each);
    }
  });
  if (pending.empty()) return;
  // Over the images of all replicas
  int num_ranks = replicas.size();
  sum_over_ranks(replicas, pending, "statistics");
  // Then over the images of both directions
  if (ProcessGroup* const pair = both_directions(model)) {
    sum_over_ranks(*pair, pending, "statistics");
    num_ranks *= pair->size();
  }
  for_stages(model,
             [=](Stage& stage) { commit_batch_norms(stage, num_ranks); });
}

double statistics_bytes(PipelineModel& model, const ProcessGroup& replicas) {
  // One sum for each running statistic, in f64
  double bytes = 0;
  for (const NamedTensor& each : running_statistics(model)) {
    bytes += 8 * static_cast<double>(each.tensor.numel());
  }
  const auto all_reduce = [](double ranks) { return 2 * (ranks - 1) / ranks; };
  const ProcessGroup* const pair = both_directions(model);
  return bytes * (all_reduce(replicas.size()) +
                  (pair == nullptr ? 0 : all_reduce(pair->size())));
}

std::vector<NamedTensor> running_statistics(PipelineModel& model) {
  std::vector<NamedTensor> all;
  for_stages(model, [&](Stage& stage) {
    for (NamedTensor& each : stage.named_buffers()) {
      all.push_back(std::move(each));
    }
  });
  return all;
}

}  // namespace shardbook::hybrid
