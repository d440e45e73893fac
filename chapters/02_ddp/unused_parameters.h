#pragma once

// Parameters that a forward does not use.
//
// A parameter without a gradient would block its bucket and all later ones.
// With find_unused_parameters, such parameters contribute zeros at once. One
// more all-reduce counts the ranks that used each parameter: if no rank did,
// its gradient is left alone, because momentum and weight decay must not move
// it. A static graph counts its ranks the same way, once.

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

}  // namespace shardbook::ddp
