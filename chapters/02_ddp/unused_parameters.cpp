#include "chapters/02_ddp/unused_parameters.h"

#include <unordered_set>

#include "core/autograd.h"

namespace shardbook::ddp {

std::vector<int> find_unused_parameters(const Tensors& outputs,
                                        const Tensors& parameters) {
  std::unordered_set<const void*> reached;
  for (const Tensor& leaf : autograd::reachable_leaves(outputs)) {
    reached.insert(leaf.id());
  }
  std::vector<int> unused;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (reached.count(parameters[i].id()) == 0) {
      unused.push_back(static_cast<int>(i));
    }
  }
  return unused;
}

void UsageReduction::launch(ProcessGroup& group) {
  MemoryScope kind(MemoryKind::kCommunication);
  sum_ = Tensor();  // frees memory for the next one
  sum_ = Tensor::from_values<std::int32_t>(
      is_used_, {static_cast<std::int64_t>(is_used_.size())});
  work_ = group.all_reduce(sum_, ReduceOp::kSum, "used parameters");
}

void UsageReduction::read_result() {
  num_users_ = sum_.is_meta() ? is_used_ : sum_.to_vector<std::int32_t>();
}

}  // namespace shardbook::ddp
