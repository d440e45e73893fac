#include "chapters/02_ddp/sync_batch_norm.h"

#include "core/layers.h"

namespace shardbook::ddp {

int convert_sync_batchnorm(Module& module, ProcessGroup& group) {
  const std::shared_ptr<ProcessGroup> own =
      group.split(/*color=*/0, /*key=*/group.rank(), "sync_batch_norm");
  int count = 0;
  for (const NamedModule& entry : module.named_modules()) {
    auto* norm = dynamic_cast<BatchNorm*>(entry.module);
    if (norm == nullptr) continue;
    norm->sum_over_ranks = [own](const Tensor& sums) {
      own->all_reduce(sums, ReduceOp::kSum, "statistics").wait();
    };
    count += 1;
  }
  return count;
}

}  // namespace shardbook::ddp
