#pragma once

// The reducer: gradients leave while backward still runs.
//
//   backward:   grad of layer 3 | layer 2 | layer 1 | wait
//   network:                    | bucket 0 ........ | bucket 1 ....
//
// Each parameter has a hook that runs when its gradient is there. The hook
// copies the gradient, divided by the number of ranks, into its place in a
// bucket. A full bucket starts its all-reduce at once and backward goes on; the
// end of backward waits for all of them.
//
// All ranks must issue the same calls in the same order, while gradients may
// arrive in different orders. So bucket j leaves only after buckets 0..j-1,
// whichever fills first.
//
// Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
// Parallel Training", sections 3.2 and 4.2.

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "chapters/02_ddp/bucket.h"
#include "chapters/02_ddp/unused_parameters.h"
#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::ddp {

struct DdpOptions {
  double bucket_cap_mb = 25;
  double first_bucket_mb = 1;
  /// See unused_parameters.h. Costs a walk over the graph and an all-reduce of
  /// one i32 per parameter and step.
  bool find_unused_parameters = false;
  /// Gradients are views of the buckets: saves a second array for them.
  bool gradient_as_bucket_view = false;
  /// The user promises that every iteration uses the same parameters equally
  /// often (unused_parameters.h). The first one reduces at its end.
  bool static_graph = false;
  /// Broadcasts rank 0's buffers (BatchNorm's running statistics) before a
  /// forward that follows a synchronised one.
  bool broadcast_buffers = true;
};

class Reducer {
 public:
  /// `parameters`: distinct, all of them require gradients. Registers one hook
  /// on each; the destructor removes them.
  Reducer(std::vector<NamedTensor> parameters, ProcessGroup& group,
          const DdpOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Throws Error that names the parameters without a gradient when the last
  /// backward left buckets behind. After a failed backward, it throws until the
  /// gradients have been cleared.
  void check_finished();
  /// Called once, after the first reduction: orders the buckets as gradients
  /// arrived on rank 0. Broadcasts one i32 per parameter.
  void rebuild_buckets();
  /// The next backward reduces; the sum over the ranks is divided by `divisor`.
  /// It may begin from any of `outputs`.
  void expect_reduction(const Tensors& outputs, double divisor);
  /// The next backward only accumulates.
  void expect_nothing() { is_expecting_ = false; }
  /// A backward has reached an output that was given to expect_reduction.
  /// Throws Error when the reduction has already run or been dropped: these
  /// gradients would stay on this rank.
  void check_expecting();
  /// Takes part in the others' reduction with zeros, and ignores its result.
  void reduce_zeros(double divisor);

  /// Parameters' indices by bucket, in launch order.
  std::vector<BucketMembers> buckets() const;
  bool has_rebuilt() const { return has_rebuilt_; }
  void set_comm_hook(CommHook hook) { comm_hook_ = std::move(hook); }

 private:
  struct Slot {
    std::size_t index = 0;  ///< among the parameters
    std::string name;
    Tensor parameter;
    int hook_key = 0;
    std::size_t bucket = 0;
    Tensor view;  ///< this parameter's place in its bucket
    bool is_ready = false;
    /// Arrival position of the gradient, in the recorded iteration.
    int arrival = 0;
  };

  Slot& slot(int i) { return slots_[static_cast<std::size_t>(i)]; }
  Tensors parameters() const;
  void make_buckets(const std::vector<BucketMembers>& assignment);
  std::vector<int> arrival_order() const;
  void on_gradient(Slot& slot);
  void begin_reduction();
  void mark_ready(Slot& slot, bool is_used);
  void copy_into_bucket(Slot& slot, bool is_used);
  void launch_next_bucket();
  void finish_reduction();
  void take_result(Slot& slot);
  void forget_failed_backward();
  bool is_in_bucket(const Slot& slot, const Tensor& grad) const;
  bool finds_unused() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  bool is_counting_uses() const {
    return options_.static_graph && !has_reduced_;
  }
  bool reduces_usage() const { return finds_unused() || is_counting_uses(); }

  ProcessGroup& group_;
  const DdpOptions options_;
  CommHook comm_hook_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;  ///< in launch order
  /// Hooks run on one thread per device of the graph.
  std::mutex mutex_;

  bool is_expecting_ = false;
  bool is_reducing_ = false;
  std::atomic<bool> has_failed_ = false;  ///< backward threw
  bool has_reduced_ = false, has_rebuilt_ = false;
  double divisor_ = 1;
  std::size_t next_bucket_ = 0;
  int num_arrived_ = 0;
  /// Parameters that the expected backward will not reach.
  std::vector<int> unused_;
  StaticGraph static_graph_;
  UsageReduction usage_;
};

}  // namespace shardbook::ddp
