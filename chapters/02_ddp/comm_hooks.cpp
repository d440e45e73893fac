#include "chapters/02_ddp/comm_hooks.h"

#include "core/kernels/elementwise.h"

namespace shardbook::ddp {

CommHook all_reduce_hook() {
  return [](const GradBucket& bucket, ProcessGroup& group) -> FinishBucket {
    scale_into(bucket.gradients, 1 / bucket.divisor, bucket.gradients);
    auto work = std::make_shared<Work>(
        group.all_reduce(bucket.gradients, ReduceOp::kSum,
                         "bucket " + std::to_string(bucket.index)));
    return [work] { work->wait(); };
  };
}

CommHook bf16_compress_hook() {
  return [](const GradBucket& bucket, ProcessGroup& group) -> FinishBucket {
    // Divide first: the sum of many ranks must not lose what bf16 can hold
    scale_into(bucket.gradients, 1 / bucket.divisor, bucket.gradients);
    MemoryScope kind(MemoryKind::kCommunication);
    const Tensor small =
        Tensor::empty(bucket.gradients.shape(),
                      {DType::kBF16, bucket.gradients.device()});
    small.copy_from(bucket.gradients);
    auto work = std::make_shared<Work>(
        group.all_reduce(small, ReduceOp::kSum,
                         "bf16 bucket " + std::to_string(bucket.index)));
    return [work, small, gradients = bucket.gradients] {
      work->wait();
      gradients.copy_from(small);
    };
  };
}

void scale_into(const Tensor& source, double factor, const Tensor& target) {
  // A gradient that shares the bucket's memory lies in its place there
  const bool in_place = source.shares_storage(target);
  if (in_place && factor == 1) return;
  if (factor == 1) {
    target.copy_from(source);
    return;
  }
  RankContext& context = RankContext::current();
  OpEvent event;
  event.name = "scale gradient";
  event.flops = static_cast<double>(source.numel());
  event.bytes = 2.0 * static_cast<double>(source.bytes());
  event.phase = context.phase;
  event.device = source.device();
  event.dtype = source.dtype();
  event.stream = context.stream;
  context.notify_op_begin(event);
  if (!source.is_meta()) {
    kernels::scale(context.kernels(), source.dtype(), source.numel(), factor,
                   source.raw(), target.raw());
  }
  context.notify_op_end(event);
}

}  // namespace shardbook::ddp
