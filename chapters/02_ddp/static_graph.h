#pragma once

// A static graph: every iteration uses the same parameters equally often.
//
// A layer in two recomputed blocks gets its gradient in two parts. The first
// iteration counts how often each parameter's hook runs; in later ones, a
// gradient is ready with its last use.

#include <algorithm>
#include <cstddef>
#include <vector>

namespace shardbook::ddp {

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
