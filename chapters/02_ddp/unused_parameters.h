#pragma once

// Parameters that a forward does not use, or uses several times.
//
// A parameter without a gradient would block its bucket and all later ones.
// With find_unused_parameters, such parameters contribute zeros at once. One
// more all-reduce counts the ranks that used each parameter: if no rank did,
// its gradient is left alone, because momentum and weight decay must not move
// it. A static graph counts its ranks the same way, once.
//
// A static graph uses the same parameters equally often in every iteration. A
// layer in two recomputed blocks gets its gradient in two parts. The first
// iteration counts how often each parameter's hook runs; in later ones, a
// gradient is ready with its last use.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/process_group.h"
#include "core/tensor.h"

namespace shardbook::ddp {

/// Indices of the `parameters` that backward from `outputs` will not reach.
/// Costs a walk over the graph.
std::vector<int> find_unused_parameters(const Tensors& outputs,
                                        const Tensors& parameters);

/// The number of ranks that used each parameter since the last reduction.
class UsageReduction {
 public:
  explicit UsageReduction(std::size_t num_parameters)
      : is_used_(num_parameters) {}

  /// Marks the parameter as used on this rank.
  void mark_used(std::size_t parameter) { is_used_[parameter] = 1; }
  /// Begins the next iteration.
  void clear() { std::fill(is_used_.begin(), is_used_.end(), 0); }

  /// An all-reduce of one i32 per parameter.
  void launch(ProcessGroup& group);
  /// Waits for it, if it has been launched.
  void wait() { work_.wait(); }
  void read_result();
  /// False when the result says that no rank used the parameter.
  bool has_users(std::size_t parameter) const {
    return num_users_.empty() || num_users_[parameter] != 0;
  }

 private:
  std::vector<std::int32_t> is_used_, num_users_;  // by parameter
  Tensor sum_;
  Work work_;
};

class StaticGraph {
 public:
  explicit StaticGraph(std::size_t num_parameters)
      : uses_(num_parameters), missing_uses_(num_parameters) {}

  /// In the first iteration.
  void count_use(std::size_t parameter) { uses_[parameter] += 1; }
  bool is_used(std::size_t parameter) const { return uses_[parameter] > 0; }
  void forget_uses() { std::fill(uses_.begin(), uses_.end(), 0); }

  /// Begins a later iteration.
  void expect_uses() { missing_uses_ = uses_; }
  /// Counts one use of the parameter; true from the last expected use on.
  bool is_last_use(std::size_t parameter) {
    return --missing_uses_[parameter] <= 0;
  }
  /// The parameters that backward will not reach.
  std::vector<int> unused() const {
    std::vector<int> unused;
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      if (!is_used(i)) unused.push_back(static_cast<int>(i));
    }
    return unused;
  }

 private:
  std::vector<int> uses_, missing_uses_;  // by parameter
};

}  // namespace shardbook::ddp
