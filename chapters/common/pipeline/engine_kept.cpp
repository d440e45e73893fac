// What the ranks of an engine keep between forward and backward, by its schedule
// and the bytes of its layers.

#include <algorithm>

#include "chapters/common/pipeline/engine.h"
#include "chapters/common/run/report.h"

namespace shardbook::pipeline {

// A set of activations is kept from F to B or I, and what the weights' gradients
// need from I to W. A value or a gradient that two stages of this rank hand to
// each other is kept until the second one has taken it.
double Engine::predicted_kept(const LayerBytes& kept,
                              const LayerBytes& deferred, bool keeps_input) {
  using Key = std::pair<int, int>;  // micro-batch and stage
  std::map<Key, double> sets, values, gradients;
  double peak = 0;
  for (const Action& action :
       schedule_.actions[static_cast<std::size_t>(world_.rank())]) {
    if (action.kind == ActionKind::kUpdate) continue;
    const int b = action.micro_batch;
    const int stage = stages_[static_cast<std::size_t>(action.chunk)];
    const Key here{b, stage}, next{b, stage + 1};
    const bool hands_on = !is_last(stage) && is_here(b, stage + 1);
    const bool hands_back = stage > 0 && is_here(b, stage - 1);
    switch (action.kind) {
      case ActionKind::kForward: {
        sets[here] = set_bytes(b, stage, kept);
        values.erase(here);
        if (hands_on) values[next] = forward_bytes(spec(b, stage + 1));
        double now = 0;
        for (const auto* each : {&sets, &values, &gradients}) {
          for (const auto& [key, bytes] : *each) now += bytes;
        }
        peak = std::max(peak, now);
        break;
      }
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        sets.erase(here);
        gradients.erase(next);
        if (hands_back) gradients[here] = backward_bytes(spec(b, stage));
        if (action.kind == ActionKind::kBackwardInput) {
          // What the weights' gradients of neighbours share here has no formula
          if (hands_on || hands_back) return kNotPredicted;
          sets[here] = layers_bytes(b, stage, deferred);
          if (keeps_input && stage > 0) {
            sets[here] += forward_bytes(spec(b, stage));
          }
        }
        break;
      default:
        sets.erase(here);
    }
  }
  return peak;
}

double Engine::layers_bytes(int b, int stage, const LayerBytes& bytes) {
  const auto& cuts = model_.layout().cuts;
  double sum = 0;
  for (int layer = cuts[static_cast<std::size_t>(stage)];
       layer < cuts[static_cast<std::size_t>(stage) + 1]; ++layer) {
    sum += bytes(layer, feed_.piece(b).rows);
  }
  return sum;
}

double Engine::set_bytes(int b, int stage, const LayerBytes& kept) {
  double skips = 0;
  for (const std::string& name : model_.stage(stage).incoming()) {
    skips += forward_bytes(skip_spec(name, b, stage));
  }
  // Token ids and images are inputs
  const double input = stage > 0 ? forward_bytes(spec(b, stage)) : 0;
  const int chunk = schedule_.place(b, stage).chunk;
  if (recomputed_.contains(schedule_.listed(b), chunk)) return input + skips;
  // What is sent on as a skip counts as a message, also where a block reads it
  const auto& cuts = model_.layout().cuts;
  const int last = cuts[static_cast<std::size_t>(stage) + 1] - 1;
  const std::vector<std::string> at_end = model_.layers().skips(last).stash;
  for (const std::string& name : model_.stage(stage).outgoing()) {
    if (std::find(at_end.begin(), at_end.end(), name) != at_end.end()) continue;
    skips -= forward_bytes(skip_spec(name, b, stage + 1));
  }
  // The first block reads the sum of its input and a skip, both of which stay
  const int first = cuts[static_cast<std::size_t>(stage)];
  const bool adds = !model_.layers().skips(first).pop.empty();
  return layers_bytes(b, stage, kept) + skips + (adds ? input : 0);
}

}  // namespace shardbook::pipeline
