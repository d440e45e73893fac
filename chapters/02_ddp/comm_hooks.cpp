#include "chapters/02_ddp/comm_hooks.h"

#include "core/inplace.h"

namespace shardbook::ddp {

CommHook bf16_compress_hook() {
  return [](const GradBucket& bucket, ProcessGroup& group) {
    // Divide first: the sum of many ranks must not lose what bf16 can hold
    return predivide_hook(bucket.divisor, DType::kBF16)(bucket, group);
  };
}

CommHook predivide_hook(double before, std::optional<DType> wire) {
  return [=](const GradBucket& bucket, ProcessGroup& group) -> FinishBucket {
    const Tensor gradients = bucket.gradients;
    if (before != 1) scale_into(gradients, gradients, 1 / before);
    Tensor sent = gradients;
    if (wire && *wire != gradients.dtype()) {
      const MemoryScope kind(MemoryKind::kCommunication);
      sent = Tensor::empty(gradients.shape(), {*wire, gradients.device()});
      sent.copy_from(gradients);
    }
    auto work = std::make_shared<Work>(group.all_reduce(
        sent, ReduceOp::kSum, "bucket " + std::to_string(bucket.index)));
    const double left = bucket.divisor / before;
    return [work, sent, gradients, left] {
      work->wait();
      const bool is_copy = sent.dtype() != gradients.dtype();
      if (is_copy) gradients.copy_from(sent);
      if (left != 1) scale_into(gradients, gradients, 1 / left);
    };
  };
}

}  // namespace shardbook::ddp
