#include "chapters/common/sharded/loss.h"

#include "chapters/common/models/llama_experts.h"
#include "core/autograd.h"
#include "core/check.h"

namespace shardbook {

Tensor count_targets(const Tensor& targets, DType dtype) {
  const NoGrad no_grad;
  const Tensor t = to_dtype(targets, dtype);
  // 1 for 0, 1, 2, ...; 0 for -1, -2, ...
  return sum(sub(relu(add_scalar(t, 1)), relu(t)));
}

Tensor mean_loss_over_ranks(
    const std::function<Tensor(Reduction reduction)>& local_loss,
    const Tensor& targets, const std::vector<ProcessGroup*>& groups) {
  int ranks = 1;
  for (const ProcessGroup* group : groups) ranks *= group->size();
  const Tensor local =
      local_loss(ranks == 1 ? Reduction::kMean : Reduction::kSum);
  note_local_loss(local);
  if (ranks == 1) return local;
  Tensor sums;  // of losses, and of targets
  {
    const NoGrad no_grad;
    const Tensor count = count_targets(targets, local.dtype());
    const MemoryScope kind(MemoryKind::kCommunication);
    sums = concat({reshape(local.detach(), {1}), reshape(count, {1})}, 0);
  }
  for (ProcessGroup* group : groups) {
    group->all_reduce(sums, ReduceOp::kSum, "loss").wait();
  }
  const Tensor total_count = sums.flat_view(1, {});
  // Every rank's loss is the whole mean, to which its own rows contribute
  return autograd::custom_function(
      "mean_loss_over_ranks", {local},
      [&](const Tensors&) {
        return Tensors{div(sums.flat_view(0, {}), total_count)};
      },
      [total_count](const Tensors& grads) {
        const MemoryScope kind(MemoryKind::kCommunication);
        return Tensors{div(grads[0], total_count)};
      })[0];
}

Tensor mean_loss_over_ranks(const Tensor& logits, const Tensor& targets,
                            ProcessGroup& group) {
  return mean_loss_over_ranks(
      [&](Reduction reduction) {
        return cross_entropy(logits, targets, reduction);
      },
      targets, {&group});
}

namespace {

/// The sums of these numbers over the ranks; on shapes, the numbers.
std::vector<double> sum_shares(ProcessGroup& group,
                               const std::vector<double>& numbers) {
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor sums = Tensor::from_values(
      numbers, {static_cast<std::int64_t>(numbers.size())}, Device());
  group.all_reduce(sums, ReduceOp::kSum, "router shares").wait();
  return sums.is_meta() ? numbers : sums.to_vector<double>();
}

}  // namespace

LossFunction loss_over_ranks(const ModelConfig& config, Module& model,
                             ProcessGroup& dp, std::int64_t num_micro_batches,
                             const LossFunction& loss_of) {
  if (num_balancing_shares(config) == 0) return loss_of;
  SB_CHECK(num_micro_batches == 1, "--micro-batches ", num_micro_batches, ": ",
           kBalancingLossInParts);
  return [&model, &dp, loss_of](const Tensor& logits, const Tensor& targets) {
    return with_balancing_loss(model, loss_of(logits, targets), 1,
                               [&dp](const std::vector<double>& numbers) {
                                 return sum_shares(dp, numbers);
                               });
  };
}

double balancing_bytes(const ModelConfig& config, int d) {
  return 2.0 * (d - 1) / d * 8 *
         static_cast<double>(num_balancing_shares(config));
}

}  // namespace shardbook
