// The training state by parameter name: in parts, whole, and on another number
// of ranks.

#include <algorithm>
#include <map>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {

void ZeroOptimizer::make_state(OptimizerSlot& slot, const Tensor& shard) {
  MemoryScope kind(MemoryKind::kOptimizerState);
  const DType dtype = shard.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  while (slot.state.size() < optimizer_->state_names().size()) {
    slot.state.push_back(
        Tensor::zeros({shard.numel()}, {dtype, shard.device()}));
  }
}

TrainingState ZeroOptimizer::state() {
  TrainingState state;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ShardGroup& group = groups_[i];
    for (const OwnedPart& own : group.layout.parts_of_rank(group_.rank())) {
      const auto& [name, parameter] = group.parameters[own.parameter];
      StatePart& part = state.parts.emplace_back();
      part.name = name;
      part.whole = parameter.shape();
      part.begin = own.begin;
      part.values = own.of_shard(group.shard);
      if (!group.is_trained) continue;
      part.optimizer = optimizer_.get();
      part.slot = i;
      part.slot_begin = own.shard_begin;
    }
  }
  state.loaded = [this](const std::map<std::string, double>&) {
    for (const OptimizerSlot& slot : optimizer_->slots()) {
      steps_done_ = std::max(steps_done_, slot.step);
    }
    publish_loaded();
    if (is_updating_) clear_grad();  // of a step that failed
    is_updating_ = false;
  };
  return state;
}

// --- Whole tensors -----------------------------------------------------------

std::vector<NamedTensor> ZeroOptimizer::full_parameters(bool rank0_only) {
  NoGrad no_grad;
  const Device& host = RankContext::current().host();
  const bool is_kept = !rank0_only || group_.rank() == 0;
  const std::int64_t d = group_.size();
  std::map<std::string, Tensor> full;
  for (const ShardGroup& group : groups_) {
    // Room for the whole tensors
    Tensors targets;
    for (std::size_t p = 0; is_kept && p < group.parameters.size(); ++p) {
      MemoryScope kind(memory_kind_of(group.shard));
      targets.push_back(
          Tensor::empty(group.layout.shapes[p], {group.shard.dtype(), host}));
      full[group.parameters[p].name] = targets.back();
    }
    // Columns of all shards, a bucket at a time
    const std::int64_t shard = group.shard.numel();
    const std::int64_t piece =
        std::clamp<std::int64_t>(options_.allgather_bucket_size / d, 1,
                                 std::max<std::int64_t>(shard, 1));
    for (std::int64_t begin = 0; begin < shard; begin += piece) {
      const std::int64_t n = std::min(piece, shard - begin);
      MemoryScope kind(MemoryKind::kCommunication);
      const Tensor columns =
          Tensor::empty({d * n}, {group.shard.dtype(), Device()});
      const Tensor own = columns.flat_view(group_.rank() * n, {n});
      own.copy_from(group.shard.flat_view(begin, {n}));
      group_.all_gather(columns, own, "state").wait();
      for (std::size_t p = 0; p < targets.size(); ++p) {
        for (const OwnedPart& part : group.layout.parts(p)) {
          const std::int64_t from = std::max(part.shard_begin, begin);
          const std::int64_t to =
              std::min(part.shard_begin + part.numel, begin + n);
          if (from >= to) continue;
          const Shape shape{to - from};
          targets[p]
              .flat_view(part.begin + from - part.shard_begin, shape)
              .copy_from(
                  columns.flat_view(part.owner * n + from - begin, shape));
        }
      }
    }
  }

  // In definition order; frozen parameters that are not in shards are copied
  std::vector<NamedTensor> named;
  if (!is_kept) return named;
  for (const NamedTensor& entry : module_.named_parameters()) {
    Tensor& whole = full[entry.name];
    if (!whole.defined()) {
      whole = Tensor::empty(entry.tensor.shape(), {entry.tensor.dtype(), host});
      whole.copy_from(entry.tensor);
    }
    named.push_back({entry.name, whole});
  }
  return named;
}

}  // namespace shardbook::zero
