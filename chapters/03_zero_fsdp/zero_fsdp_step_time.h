#pragma once

// The time of a step on the cluster `textbook`, as a closed form.
//
//   forward    gather | gather  | gather  |
//                     | layer 1 | layer 2 | layer 3 | head
//   backward     gather | gather  | scatter, gather | scatter | scatter
//                head   | layer 3 | layer 2         | layer 1 |
//
// A layer computes while the next one is gathered; in backward, the gradients of
// the layer before it travel first.

#include <vector>

#include "chapters/common/run/textbook.h"

namespace shardbook::zero_fsdp {

/// Seconds of the messages of a unit: its parameters, its gradients.
struct UnitMessages {
  double gather = 0, reduce = 0;
};

/// The times of a micro-step.
struct ShardedStep {
  textbook::ModelTimes model;
  UnitMessages root;
  /// In the order of forward; none: the root has all parameters.
  std::vector<UnitMessages> layers;
  bool prefetches_forward = true, prefetches_backward = true;
  /// Whether units are gathered again for backward.
  bool gathers_root_again = false, gathers_layers_again = true;
  /// A layer ends when the gradients of the one before it have arrived.
  bool waits_for_gradients = false;
};

/// Seconds of several micro-steps. After the last forward, the all-reduce of
/// the loss needs `loss_s`.
double step_s(const ShardedStep& step, double micro_steps, double loss_s);

}  // namespace shardbook::zero_fsdp
