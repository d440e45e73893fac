#include "chapters/03_zero_fsdp/zero_fsdp_step_time.h"

#include <algorithm>

namespace shardbook::zero_fsdp {
namespace {

/// Seconds of computation and messages, overlapped or in turn.
double both(bool at_once, double computes, double travels) {
  return at_once ? std::max(computes, travels) : computes + travels;
}

/// After its forward, the all-reduce of the loss needs `loss_s`.
double micro_step_s(const ShardedStep& step, double loss_s) {
  const textbook::ModelTimes& model = step.model;
  const auto& layers = step.layers;
  const std::size_t n = layers.size();
  // The root's gradients leave last
  if (n == 0) {
    return step.root.gather + model.forward() +
           std::max(model.backward(), loss_s) + step.root.reduce;
  }
  // Forward: the root's parameters, and the first layer's
  double seconds =
      step.root.gather + std::max(model.embedding, layers[0].gather);
  for (std::size_t i = 0; i < n; ++i) {
    seconds += both(step.prefetches_forward, model.layer_forward,
                    i + 1 < n ? layers[i + 1].gather : 0);
  }
  seconds += model.head;

  // Backward begins with the head, while the last layer is gathered
  const double head = model.head_backward;
  double begins = 0;
  if (step.gathers_root_again) begins = loss_s + step.root.gather;
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
           step.root.reduce;
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
         step.root.reduce;
}

}  // namespace

double step_s(const ShardedStep& step, double micro_steps, double loss_s) {
  return (micro_steps - 1) * micro_step_s(step, 0) + micro_step_s(step, loss_s);
}

}  // namespace shardbook::zero_fsdp
