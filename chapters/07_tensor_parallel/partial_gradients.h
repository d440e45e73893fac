#pragma once

// Gradients of a Llama of which every rank has a term after backward.
//
//   q_norm, k_norm     every rank has the weight, and normalises its own heads
//   keys and values    more ranks than heads: neighbours hold the same columns,
//                      and each of them sees the gradient of its own queries
//
//   8 heads of queries, 2 of keys    t = 2          t = 4
//   queries                          0123 4567      01   23   45   67
//   keys                             0    1         0    0    1    1
//
// The terms are added once, after the last micro-batch. All other gradients are
// whole: those of a GPT-2, and of keys that t divides.
// Ainslie et al. 2023, "GQA"; Megatron-LM's num_query_groups.

#include <memory>
#include <vector>

#include "chapters/common/models/models.h"
#include "comm/process_group.h"

namespace shardbook::tensor_parallel {

/// What the ranks add in a step.
struct PartialSizes {
  double norms = 0;   ///< elements, over all ranks
  double shared = 0;  ///< elements of keys and values, over `sharers` ranks
  int sharers = 1;    ///< ranks that hold the same keys
};
PartialSizes partial_sizes(const ModelConfig& config, int t);

class PartialGradients {
 public:
  /// Collective.
  PartialGradients(const ModelConfig& config, ProcessGroup& tp);
  /// Adds the terms of these parameters' gradients, in one all-reduce over all
  /// ranks and one over those that share keys. Collective.
  void sum(const std::vector<NamedTensor>& parameters) const;

 private:
  ModelConfig config_;
  ProcessGroup& tp_;
  /// The ranks that hold the same keys; null: they hold different ones.
  std::shared_ptr<ProcessGroup> sharers_;
};

}  // namespace shardbook::tensor_parallel
