// The training state by parameter name: in parts, whole, and on another number
// of ranks.

#include <algorithm>
#include <map>
#include <numeric>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "core/check.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {
namespace {

/// A tensor that lies as a shard does: the shard itself, its master copy, a
/// moment.
struct Field {
  std::string name;
  Tensor values;  ///< [S]
};

std::vector<Field> fields_of(const Tensor& shard, OptimizerSlot* slot,
                             const std::vector<std::string>& state_names) {
  std::vector<Field> fields = {{"parameter", shard}};
  if (slot == nullptr) return fields;
  if (slot->master.defined()) fields.push_back({"master", slot->master});
  for (std::size_t i = 0; i < slot->state.size(); ++i) {
    fields.push_back({state_names[i], slot->state[i]});
  }
  return fields;
}

}  // namespace

void ZeroOptimizer::make_state(OptimizerSlot& slot, const Tensor& shard) {
  MemoryScope kind(MemoryKind::kOptimizerState);
  const DType dtype = shard.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  while (slot.state.size() < optimizer_->state_names().size()) {
    slot.state.push_back(
        Tensor::zeros({shard.numel()}, {dtype, shard.device()}));
  }
}

std::vector<ShardPiece> ZeroOptimizer::shards() const {
  std::vector<ShardPiece> pieces;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ShardGroup& group = groups_[i];
    OptimizerSlot* slot = group.is_trained ? &optimizer_->slots()[i] : nullptr;
    for (const Field& field :
         fields_of(group.shard, slot, optimizer_->state_names())) {
      for (const OwnedPart& part : group.parts) {
        if (part.owner != group_.rank()) continue;
        const auto p = static_cast<std::size_t>(part.parameter);
        pieces.push_back(
            {group.parameters[p].name, field.name, group.shapes[p], part.begin,
             field.values.flat_view(part.shard_begin, {part.numel})});
      }
    }
  }
  return pieces;
}

TrainingState ZeroOptimizer::state() {
  TrainingState state;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ShardGroup& group = groups_[i];
    for (const OwnedPart& each : group.parts) {
      if (each.owner != group_.rank()) continue;
      const auto p = static_cast<std::size_t>(each.parameter);
      StatePart part;
      part.name = group.parameters[p].name;
      part.whole = group.shapes[p];
      part.begin = each.begin;
      part.values = group.shard.flat_view(each.shard_begin, {each.numel});
      if (group.is_trained) {
        part.optimizer = optimizer_.get();
        part.slot = i;
        part.slot_begin = each.shard_begin;
      }
      state.parts.push_back(std::move(part));
    }
  }
  state.loaded = [this](const std::map<std::string, double>&) {
    for (const OptimizerSlot& slot : optimizer_->slots()) {
      steps_done_ = std::max(steps_done_, slot.step);
    }
    publish_loaded();
  };
  return state;
}

bool ZeroOptimizer::owns_part_of(const std::string& name, std::int64_t begin,
                                 std::int64_t numel) const {
  for (const ShardGroup& group : groups_) {
    for (const OwnedPart& part : group.parts) {
      const auto p = static_cast<std::size_t>(part.parameter);
      if (part.owner == group_.rank() && group.parameters[p].name == name &&
          part.begin < begin + numel && begin < part.begin + part.numel) {
        return true;
      }
    }
  }
  return false;
}

void ZeroOptimizer::load_shards(const std::vector<ShardPiece>& pieces,
                                std::int64_t steps_done) {
  NoGrad no_grad;
  std::map<std::pair<std::string, std::string>, std::vector<ShardPiece>>
      by_name;
  for (const ShardPiece& piece : pieces) {
    by_name[{piece.name, piece.field}].push_back(piece);
  }
  for (auto& [name, list] : by_name) {
    std::sort(list.begin(), list.end(),
              [](auto& a, auto& b) { return a.begin < b.begin; });
  }

  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ShardGroup& group = groups_[i];
    OptimizerSlot* slot = group.is_trained ? &optimizer_->slots()[i] : nullptr;
    if (slot != nullptr && steps_done > 0) {
      make_state(*slot, group.shard);
      slot->step = steps_done;
    }
    for (const Field& field :
         fields_of(group.shard, slot, optimizer_->state_names())) {
      for (const OwnedPart& part : group.parts) {
        if (part.owner != group_.rank()) continue;
        const auto p = static_cast<std::size_t>(part.parameter);
        const std::string& name = group.parameters[p].name;
        // Walk through the part, from piece to piece
        std::int64_t at = part.begin;
        const std::int64_t end = part.begin + part.numel;
        for (const ShardPiece& piece : by_name[{name, field.name}]) {
          SB_CHECK(piece.shape == group.shapes[p], "zero: '", name,
                   "' has shape ", shape_text(piece.shape),
                   ", the model needs ", shape_text(group.shapes[p]));
          const std::int64_t stop =
              std::min(end, piece.begin + piece.values.numel());
          if (piece.begin > at || stop <= at) continue;
          field.values
              .flat_view(part.shard_begin + at - part.begin, {stop - at})
              .copy_from(piece.values.flat_view(at - piece.begin, {stop - at}));
          at = stop;
        }
        SB_CHECK(at == end, "zero: no piece of '", name, "' holds element ", at,
                 " of its ", field.name, "; it has ",
                 shape_numel(group.shapes[p]), " elements");
      }
    }
  }
  steps_done_ = steps_done;
  publish_loaded();
  if (is_updating_) clear_grad();  // of a step that failed
  is_updating_ = false;
}

// --- Whole tensors -----------------------------------------------------------

std::vector<NamedTensor> ZeroOptimizer::gather_full(bool of_optimizer,
                                                    bool rank0_only) {
  NoGrad no_grad;
  const Device& host = RankContext::current().host();
  const bool is_kept = !rank0_only || group_.rank() == 0;
  const std::int64_t d = group_.size();
  std::map<std::string, Tensor> full;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const ShardGroup& group = groups_[i];
    OptimizerSlot* slot = group.is_trained ? &optimizer_->slots()[i] : nullptr;
    for (const Field& field :
         fields_of(group.shard, slot, optimizer_->state_names())) {
      if ((field.name != "parameter") != of_optimizer) continue;
      // Room for the whole tensors
      Tensors targets;
      for (std::size_t p = 0; is_kept && p < group.parameters.size(); ++p) {
        const std::string suffix =
            field.name == "parameter" ? "" : "." + field.name;
        MemoryScope kind(memory_kind_of(field.values));
        targets.push_back(
            Tensor::empty(group.shapes[p], {field.values.dtype(), host}));
        full[group.parameters[p].name + suffix] = targets.back();
      }
      // Columns of all shards, a bucket at a time
      const std::int64_t shard = field.values.numel();
      const std::int64_t piece =
          std::clamp<std::int64_t>(options_.allgather_bucket_size / d, 1,
                                   std::max<std::int64_t>(shard, 1));
      for (std::int64_t begin = 0; begin < shard; begin += piece) {
        const std::int64_t n = std::min(piece, shard - begin);
        MemoryScope kind(MemoryKind::kCommunication);
        const Tensor columns =
            Tensor::empty({d * n}, {field.values.dtype(), Device()});
        const Tensor own = columns.flat_view(group_.rank() * n, {n});
        own.copy_from(field.values.flat_view(begin, {n}));
        group_.all_gather(columns, own, "state").wait();
        if (!is_kept) continue;
        for (const OwnedPart& part : group.parts) {
          const std::int64_t from = std::max(part.shard_begin, begin);
          const std::int64_t to =
              std::min(part.shard_begin + part.numel, begin + n);
          if (from >= to) continue;
          targets[static_cast<std::size_t>(part.parameter)]
              .flat_view(part.begin + from - part.shard_begin, {to - from})
              .copy_from(columns.flat_view(part.owner * n + from - begin,
                                           {to - from}));
        }
      }
    }
  }
  // Frozen parameters that are not in shards
  for (const NamedTensor& entry : module_.named_parameters()) {
    if (of_optimizer || !is_kept || full.count(entry.name) > 0) continue;
    full[entry.name] =
        Tensor::empty(entry.tensor.shape(), {entry.tensor.dtype(), host});
    full[entry.name].copy_from(entry.tensor);
  }

  // In the order of definition
  std::vector<NamedTensor> named;
  for (const NamedTensor& entry : module_.named_parameters()) {
    for (const auto& [name, tensor] : full) {
      const bool is_state =
          name.compare(0, entry.name.size() + 1, entry.name + ".") == 0 &&
          name.find('.', entry.name.size() + 1) == std::string::npos;
      if (of_optimizer ? is_state : name == entry.name) {
        named.push_back({name, tensor});
      }
    }
  }
  return named;
}

std::vector<NamedTensor> ZeroOptimizer::full_parameters(bool rank0_only) {
  return gather_full(/*of_optimizer=*/false, rank0_only);
}

std::vector<NamedTensor> ZeroOptimizer::full_optimizer_state(bool rank0_only) {
  return gather_full(/*of_optimizer=*/true, rank0_only);
}

}  // namespace shardbook::zero
