// When the actions of a schedule begin and end, by seconds of layers.

#include <algorithm>

#include "chapters/common/pipeline/at.h"
#include "chapters/common/pipeline/engine.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::pipeline {

Replay Engine::predicted_times(const LayerCosts& layers,
                               const std::vector<double>& begins) {
  std::vector<Recomputed> dropped;
  for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
    dropped.emplace_back(schedule_, rank, options_.recompute);
  }
  ReplayOptions how;
  how.recomputes = [&](int rank, const Action& backward) {
    return dropped[at(rank)].contains(backward.micro_batch, backward.chunk);
  };
  how.early_recompute = options_.early_recompute;
  how.messages = [this](int stage, int b, bool is_forward) {
    std::vector<Message> sent;
    const int to = is_forward ? stage + 1 : stage - 1;
    if (to >= 0 && to < schedule_.num_stages) {
      const LayerInput& values = spec(b, std::max(stage, to));
      sent.push_back(
          {to, textbook::message(is_forward ? forward_bytes(values)
                                            : backward_bytes(values))});
    }
    for (const auto& [name, route] : skips_) {
      const int from = is_forward ? route.from_stage : route.to_stage;
      if (from != stage) continue;
      sent.push_back({is_forward ? route.to_stage : route.from_stage,
                      textbook::message(
                          forward_bytes(skip_spec(name, b, route.to_stage)))});
    }
    return sent;
  };
  how.begins = begins;
  const auto stage_costs = [&](int stage, int b) {
    Costs sum{0, 0, 0, 0};
    const auto& cuts = model_.layout().cuts;
    for (int layer = cuts[at(stage)]; layer < cuts[at(stage + 1)]; ++layer) {
      const Costs each = layers(layer, feed_.piece(b).rows);
      sum.forward += each.forward;
      sum.backward += each.backward;
      sum.backward_input += each.backward_input;
      sum.backward_weight += each.backward_weight;
    }
    return sum;
  };
  return replay(schedule_, stage_costs, how);
}

}  // namespace shardbook::pipeline
