#pragma once

// The mean loss of a batch whose rows lie on several ranks.

#include <functional>
#include <vector>

#include "chapters/common/run/training.h"
#include "comm/process_group.h"
#include "core/ops.h"

namespace shardbook {

/// How many targets are not -100: a scalar of `dtype`. Unrecorded.
Tensor count_targets(const Tensor& targets, DType dtype);

/// Mean over the targets of all ranks, the same on every rank. `local` returns
/// the loss of this rank's rows, whose targets are `targets` (targets of -100
/// do not count). Backward gives each rank the gradient of the global mean by
/// its own rows, and sends nothing.
///
/// Sums and counts are added before they are divided: a mean of means would be
/// wrong where ranks have unequally many targets, and NaN where one has none. An
/// all-reduce of two numbers over each of `groups`; with one rank, local(kMean).
Tensor mean_loss_over_ranks(
    const std::function<Tensor(Reduction reduction)>& local,
    const Tensor& targets, const std::vector<ProcessGroup*>& groups);
/// The same for the cross-entropy of whole logits [.., V].
Tensor mean_loss_over_ranks(const Tensor& logits, const Tensor& targets,
                            ProcessGroup& group);

/// The loss of data-parallel ranks: `loss_of`, and the balancing loss of the
/// model's experts over the tokens of all ranks (llama_experts.h), for which each
/// loss is a collective. With a balancing loss, throws Error for more than one
/// micro-batch.
LossFunction loss_over_ranks(const ModelConfig& config, Module& model,
                             ProcessGroup& dp, std::int64_t num_micro_batches,
                             const LossFunction& loss_of = language_loss);
/// Bytes that a rank of d sends for it in each step.
double balancing_bytes(const ModelConfig& config, int d);

}  // namespace shardbook
