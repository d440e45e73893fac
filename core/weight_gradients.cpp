#include "core/weight_gradients.h"

#include <utility>

#include "core/autograd.h"
#include "core/check.h"

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
  for (Entry& entry : entries) {
    autograd::accumulate_gradient(entry.weight, entry.compute());
    // What it kept is free for the next one
    entry = Entry();
  }
}

}  // namespace shardbook
