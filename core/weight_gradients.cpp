#include "core/weight_gradients.h"

#include <utility>

#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"

namespace shardbook {

void WeightGradients::push(const Tensor& weight, Compute compute) {
  open_.push_back({weight, std::move(compute)});
}

void WeightGradients::flush() {
  closed_.push_back(std::move(open_));
  open_.clear();
}

void WeightGradients::pop() {
  SB_CHECK(!closed_.empty(),
           "weight gradients: no micro-batch waits; call flush() after its "
           "backward");
  std::vector<Entry> entries = std::move(closed_.front());
  closed_.pop_front();
  const NoGrad no_grad;
  const PhaseScope phase(Phase::kBackward);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].weight.defined()) continue;
    Tensor grad = entries[i].compute();
    // A weight that was used several times (tied embeddings): backward sums
    // its gradients before it accumulates them, and so does this
    for (std::size_t j = i + 1; j < entries.size(); ++j) {
      if (!entries[j].weight.defined()) continue;
      if (!entries[j].weight.is_same(entries[i].weight)) continue;
      add_into(grad, entries[j].compute());
      entries[j] = Entry();
    }
    autograd::accumulate_gradient(entries[i].weight, std::move(grad));
    // Free the memory that this entry kept before the next one computes
    entries[i] = Entry();
  }
}

}  // namespace shardbook
