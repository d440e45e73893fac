#pragma once

// Buckets: which gradients travel together, and how they travel.
//
// One all-reduce per parameter would pay the latency of a message for every
// bias; one all-reduce for everything could not start before backward ends.
// Buckets are the middle: a small first one that leaves early, then large ones.
// The assignment is a pure function: print it, draw it, test it without ranks.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "chapters/02_ddp/comm_hooks.h"
#include "comm/process_group.h"
#include "core/tensor.h"

namespace shardbook::ddp {

/// The facts about a parameter that the assignment needs.
struct BucketItem {
  std::int64_t bytes = 0;
  DType dtype = DType::kF32;
  Device device{};
};

struct BucketLimits {
  std::int64_t first_bytes = std::int64_t{1} << 20;
  std::int64_t other_bytes = std::int64_t{25} << 20;
};

/// Indices of the parameters of one bucket.
using BucketMembers = std::vector<int>;

/// Walks the parameters in `order` and, for each (dtype, device), appends to
/// the open bucket and THEN closes it when its size has reached the limit: a
/// bucket may exceed its limit by one parameter. The first bucket that a
/// (dtype, device) closes uses `first_bytes`, all others `other_bytes`. Buckets
/// come in the order of their last members' places in `order`. No bucket mixes
/// dtypes or devices. Throws Error when `order` is no permutation.
/// Li et al. 2020, "PyTorch Distributed", section 3.2.3.
std::vector<BucketMembers> assign_buckets(const std::vector<BucketItem>& items,
                                          const std::vector<int>& order,
                                          const BucketLimits& limits = {});

/// The buckets of the first iteration, in launch order: assigned in the order
/// of definition, sorted by smallest index, and the LIST reversed, because
/// backward begins with the parameters that were defined last.
std::vector<BucketMembers> initial_buckets(const std::vector<BucketItem>& items,
                                           const BucketLimits& limits = {});

/// Gradients that travel together, end to end in one buffer. In each backward
/// it fills, is launched, and is waited for.
class Bucket {
 public:
  /// `contents`: the view for communication hooks.
  Bucket(BucketMembers members, GradBucket contents)
      : members_(std::move(members)), contents_(std::move(contents)) {}

  const BucketMembers& members() const { return members_; }
  const Tensor& buffer() const { return contents_.gradients; }

  /// Marks the gradients of all members as missing.
  void expect_gradients() { num_missing_ = members_.size(); }
  /// Counts one more gradient in its place.
  void mark_ready() { num_missing_ -= 1; }
  bool is_full() const { return num_missing_ == 0; }

  /// Starts the all-reduce, or calls `hook` instead.
  void launch(double divisor, const CommHook& hook, ProcessGroup& group);
  /// Waits for it, if it has been launched: the buffer holds the means.
  void wait();

 private:
  BucketMembers members_;
  GradBucket contents_;
  std::size_t num_missing_ = 0;
  FinishBucket finish_;
};

}  // namespace shardbook::ddp
