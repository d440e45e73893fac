#pragma once

// Deferred weight gradients.
//
// The backward of a linear layer computes two gradients: of its input, for
// which the stage before is waiting, and of its weight, which nothing waits
// for. With a store installed, operations compute the first at once and leave
// the second here:
//
//   WeightGradients later;
//   {
//     DeferWeightGradients scope(later);
//     autograd::backward({loss});        // inputs' gradients only
//   }
//   later.flush();                       // one micro-batch is complete
//   ...
//   later.pop();                         // the oldest micro-batch's weights
//
// Gradients of biases and norms are cheap and computed at once. Deferred ones
// are accumulated in the order of backward, micro-batch by micro-batch, so sums
// have the same bits as without the store.
//
// A leaf whose gradient waits here is NOT complete when backward returns:
// clipping, hooks that communicate, and the optimizer wait for the last pop.
// Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.

#include <deque>
#include <functional>
#include <vector>

#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {

class WeightGradients {
 public:
  using Compute = std::function<Tensor()>;

  /// Defers `compute`, whose result will be accumulated in `weight`.
  void push(const Tensor& weight, Compute compute);
  /// Closes the list of one micro-batch; it may be empty.
  void flush();
  /// Computes the oldest closed list, and accumulates it in the weights, whose
  /// hooks run. Throws Error when there is none.
  void pop();
  /// Number of closed lists that wait.
  std::size_t size() const { return closed_.size(); }
  /// True when nothing waits, in closed lists or the open one.
  bool empty() const { return closed_.empty() && open_.empty(); }

 private:
  struct Entry {
    Tensor weight;
    Compute compute;
  };
  std::vector<Entry> open_;
  std::deque<std::vector<Entry>> closed_;
};

/// Weight gradients inside the scope go to `store`.
class DeferWeightGradients : public ContextValue<WeightGradients*> {
 public:
  explicit DeferWeightGradients(WeightGradients& store)
      : ContextValue(&RankContext::weight_gradients, &store) {}
};

}  // namespace shardbook
