#pragma once

// Which buckets of gradients may leave while backward goes on.
//
//   micro-batch 0, 1, 2    gradients are added; nothing may leave
//   micro-batch 3          h.3 | h.2 | h.1 | h.0
//   network                    | bucket of h.2 and h.3 | bucket of h.0 and h.1
//
// A bucket is full when the last micro-batch has added all its gradients to
// each of its parameters. That may be more than one: under DualPipe, a stage
// ends with a B in one direction, and an I and a W in the other, and a rank with
// the first and the last stage has the tied embedding in both. The first step
// counts them, as DDP does for a static graph, so in it no bucket leaves before
// the end.
//
// All replicas of a stage must send in the same order: the one in which the
// buckets were full in the first step. Replicas run the same schedule, so they
// agree on it.

#include <cstddef>
#include <vector>

#include "chapters/02_ddp/unused_parameters.h"

namespace shardbook::hybrid {

class FullBuckets {
 public:
  /// `bucket_of`: by parameter. A bucket without parameters never leaves.
  FullBuckets(std::vector<std::size_t> bucket_of, std::size_t num_buckets);

  /// The last micro-batch has added a gradient to the parameter. Returns the
  /// buckets that leave now, in order.
  std::vector<std::size_t> count(std::size_t parameter);
  /// Backward has ended. Returns the buckets that have not left, in order.
  std::vector<std::size_t> end_step();

 private:
  std::vector<std::size_t> bucket_of_;
  ddp::StaticGraph gradients_;
  std::vector<int> num_incomplete_;  ///< parameters, by bucket
  /// By bucket: when its last gradient came in the first step.
  std::vector<std::size_t> filled_;
  std::size_t num_counted_ = 0;
  /// Buckets as they leave; in the first step, by number.
  std::vector<std::size_t> order_;
  bool is_first_step_ = true;
  std::size_t next_ = 0;
};

}  // namespace shardbook::hybrid
