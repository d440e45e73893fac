#include "chapters/03_zero_fsdp/fsdp/state_dict.h"

#include <algorithm>

#include "core/check.h"
#include "core/context.h"

namespace shardbook::fsdp {
namespace {

Tensor copy_of(const Tensor& x, bool to_host) {
  MemoryScope kind(MemoryKind::kParameter);
  RankContext& context = RankContext::current();
  const Tensor copy = Tensor::empty(
      x.shape(), {x.dtype(), to_host ? context.host() : context.device});
  copy.copy_from(x);
  return copy;
}

/// Sorts the units' tensors by the model's order of definition.
std::vector<NamedTensor> in_order(Module& module,
                                  const std::map<std::string, Tensor>& found) {
  std::vector<NamedTensor> ordered;
  for (const NamedTensor& parameter : module.named_parameters()) {
    const auto it = found.find(parameter.name);
    if (it != found.end()) ordered.push_back({it->first, it->second});
  }
  return ordered;
}

bool keeps(FullyShardedDataParallel& fsdp, const FullStateDictOptions& setup) {
  return !setup.rank0_only || fsdp.group().rank() == 0;
}

/// One state tensor of a unit in the layout of its shard, from the slots of the
/// unit's parts; undefined if none was updated.
Tensor packed_state(const FlatParameter& unit, Optimizer& optimizer,
                    std::size_t first_slot, std::size_t which) {
  const auto& trained = unit.trained();
  if (trained.size() == 1 && trained[0].tensor.is_same(unit.shard())) {
    const OptimizerSlot& slot = optimizer.slots()[first_slot];
    return which < slot.state.size() ? slot.state[which] : Tensor();
  }
  Tensor packed;
  std::size_t next = first_slot;
  for (std::size_t i = 0; i < unit.names().size(); ++i) {
    if (!unit.leaves()[i].requires_grad()) continue;
    const OptimizerSlot& slot = optimizer.slots()[next++];
    if (which >= slot.state.size()) continue;
    if (!packed.defined()) {
      MemoryScope kind(MemoryKind::kOptimizerState);
      packed = Tensor::zeros(unit.shard().shape(), slot.state[which].options());
    }
    const Piece piece = unit.layout().piece(i, unit.shard_rank());
    part_of(packed, piece.shard_offset, piece.numel())
        .copy_from(slot.state[which]);
  }
  return packed;
}

void check_optimizer(FullyShardedDataParallel& fsdp, Optimizer& optimizer) {
  const Tensors own = fsdp.parameters();
  const Tensors& theirs = optimizer.parameters();
  SB_CHECK(own.size() == theirs.size() &&
               std::equal(own.begin(), own.end(), theirs.begin(),
                          [](const Tensor& a, const Tensor& b) {
                            return a.is_same(b);
                          }),
           "fsdp: the optimizer's ", theirs.size(), " parameters are not the ",
           own.size(), " of FullyShardedDataParallel::parameters()");
}

}  // namespace

// --- Full ----------------------------------------------------------------------

std::vector<NamedTensor> full_state_dict(FullyShardedDataParallel& fsdp,
                                         const FullStateDictOptions& options) {
  std::map<std::string, Tensor> found;
  for (const FlatParameter* unit : fsdp.units()) {
    const Tensor full = unit->gather(unit->shard(), "state");
    if (!keeps(fsdp, options)) continue;
    for (std::size_t i = 0; i < unit->names().size(); ++i) {
      found[unit->names()[i]] =
          copy_of(unit->view(full, i), options.offload_to_cpu);
    }
  }
  return in_order(fsdp.module(), found);
}

void load_full_state_dict(FullyShardedDataParallel& fsdp,
                          const std::vector<NamedTensor>& state) {
  std::vector<ShardedTensor> pieces;
  for (const NamedTensor& entry : state) {
    pieces.push_back({entry.name, entry.tensor.shape(), 0, entry.tensor});
  }
  load_sharded_state_dict(fsdp, pieces);
}

// --- Sharded -------------------------------------------------------------------

std::vector<ShardedTensor> sharded_state_dict(FullyShardedDataParallel& fsdp) {
  std::vector<ShardedTensor> pieces;
  for (const FlatParameter* unit : fsdp.units()) {
    for (std::size_t i = 0; i < unit->names().size(); ++i) {
      const Piece piece = unit->layout().piece(i, unit->shard_rank());
      if (piece.numel() == 0) continue;
      const Tensor values =
          part_of(unit->shard(), piece.shard_offset, piece.numel());
      pieces.push_back({unit->names()[i], unit->layout().shapes[i], piece.begin,
                        copy_of(values, /*to_host=*/true)});
    }
  }
  return pieces;
}

void load_sharded_state_dict(FullyShardedDataParallel& fsdp,
                             const std::vector<ShardedTensor>& pieces) {
  fsdp.reshard_all();
  std::map<std::string, std::vector<const ShardedTensor*>> by_name;
  for (const ShardedTensor& piece : pieces) {
    by_name[piece.name].push_back(&piece);
  }
  for (auto& [name, list] : by_name) {
    std::sort(list.begin(), list.end(),
              [](const ShardedTensor* a, const ShardedTensor* b) {
                return a->begin < b->begin;
              });
  }
  for (const FlatParameter* unit : fsdp.units()) {
    for (std::size_t i = 0; i < unit->names().size(); ++i) {
      const std::string& name = unit->names()[i];
      const Piece own = unit->layout().piece(i, unit->shard_rank());
      // Copy the overlap of each piece with this rank's
      std::int64_t covered = own.begin;
      for (const ShardedTensor* piece : by_name[name]) {
        SB_CHECK(piece->shape == unit->layout().shapes[i], "fsdp: '", name,
                 "' has shape ", shape_text(piece->shape),
                 " in the state, the model needs ",
                 shape_text(unit->layout().shapes[i]));
        const std::int64_t end =
            std::min(own.end, piece->begin + piece->values.numel());
        if (piece->begin > covered || end <= covered) continue;
        part_of(unit->shard(), own.shard_offset + covered - own.begin,
                end - covered)
            .copy_from(
                part_of(piece->values, covered - piece->begin, end - covered));
        covered = end;
      }
      SB_CHECK(covered >= own.end, "fsdp: the state has no element ", covered,
               " of '", name, "' ", shape_text(unit->layout().shapes[i]),
               "; give the pieces of all ranks that saved it");
    }
  }
}

// --- Local ---------------------------------------------------------------------

std::vector<NamedTensor> local_state_dict(FullyShardedDataParallel& fsdp) {
  std::vector<NamedTensor> state;
  for (const FlatParameter* unit : fsdp.units()) {
    state.push_back({unit->name(), copy_of(unit->shard(), /*to_host=*/true)});
  }
  return state;
}

void load_local_state_dict(FullyShardedDataParallel& fsdp,
                           const std::vector<NamedTensor>& state) {
  fsdp.reshard_all();
  const auto units = fsdp.units();
  SB_CHECK(state.size() == units.size(), "fsdp: the local state has ",
           state.size(), " units, the model ", units.size(),
           "; a local state loads under the same wrapping only");
  for (std::size_t u = 0; u < units.size(); ++u) {
    SB_CHECK(state[u].name == units[u]->name() &&
                 state[u].tensor.shape() == units[u]->shard().shape(),
             "fsdp: unit '", state[u].name, "' ",
             shape_text(state[u].tensor.shape()), " of the local state is '",
             units[u]->name(), "' ", shape_text(units[u]->shard().shape()),
             " here; a local state loads on as many ranks under the same "
             "wrapping only");
    units[u]->shard().copy_from(state[u].tensor);
  }
}

// --- Optimizer -----------------------------------------------------------------

std::map<std::string, ParameterState> full_optim_state_dict(
    FullyShardedDataParallel& fsdp, Optimizer& optimizer,
    const FullStateDictOptions& options) {
  check_optimizer(fsdp, optimizer);
  const std::vector<std::string> names = optimizer.state_names();
  std::map<std::string, ParameterState> all;
  std::size_t first = 0;
  for (const FlatParameter* unit : fsdp.units()) {
    const std::size_t parts = unit->trained().size();
    for (std::size_t s = 0; s < names.size(); ++s) {
      const Tensor packed = packed_state(*unit, optimizer, first, s);
      if (!packed.defined()) continue;
      const Tensor full = unit->gather(packed, names[s]);
      if (!keeps(fsdp, options)) continue;
      std::size_t slot = first;
      for (std::size_t i = 0; i < unit->names().size(); ++i) {
        if (!unit->leaves()[i].requires_grad()) continue;
        ParameterState& entry = all[unit->names()[i]];
        entry.step = optimizer.slots()[slot].step;
        entry.state.push_back(
            {names[s], copy_of(unit->view(full, i), options.offload_to_cpu)});
        if (parts > 1) ++slot;
      }
    }
    first += parts;
  }
  return all;
}

void load_full_optim_state_dict(
    FullyShardedDataParallel& fsdp, Optimizer& optimizer,
    const std::map<std::string, ParameterState>& state) {
  check_optimizer(fsdp, optimizer);
  std::size_t first = 0;
  for (const FlatParameter* unit : fsdp.units()) {
    const bool is_flat = unit->trained().size() == 1 &&
                         unit->trained()[0].tensor.is_same(unit->shard());
    std::size_t next = first;
    bool is_first = true;
    for (std::size_t i = 0; i < unit->names().size(); ++i) {
      if (!unit->leaves()[i].requires_grad()) continue;
      OptimizerSlot& slot = optimizer.slots()[is_flat ? first : next++];
      const auto entry = state.find(unit->names()[i]);
      const std::int64_t step = entry == state.end() ? 0 : entry->second.step;
      SB_CHECK(!is_flat || is_first || slot.step == step, "fsdp: '",
               unit->names()[i], "' was updated ", step,
               " times, others of "
               "unit '",
               unit->name(), "' ", slot.step,
               "; set use_orig_params for a step count each");
      slot.step = step;
      const bool starts = is_first || !is_flat;
      is_first = false;
      if (entry == state.end()) continue;

      // This rank's piece of each whole tensor
      const Piece piece = unit->layout().piece(i, unit->shard_rank());
      for (std::size_t s = 0; s < entry->second.state.size(); ++s) {
        const Tensor& whole = entry->second.state[s].tensor;
        if (starts) {
          MemoryScope kind(MemoryKind::kOptimizerState);
          if (s == 0) slot.state.clear();
          slot.state.push_back(
              Tensor::zeros({is_flat ? unit->shard().numel() : piece.numel()},
                            {whole.dtype(), unit->shard().device()}));
        }
        part_of(slot.state[s], is_flat ? piece.shard_offset : 0, piece.numel())
            .copy_from(part_of(whole, piece.begin, piece.numel()));
      }
    }
    first += unit->trained().size();
  }
}

// --- Checkpoints of the whole training ----------------------------------------

TrainingState training_state(FullyShardedDataParallel& fsdp,
                             Optimizer& optimizer) {
  check_optimizer(fsdp, optimizer);
  fsdp.reshard_all();
  TrainingState state;
  std::size_t first = 0;
  for (const FlatParameter* unit : fsdp.units()) {
    const bool is_flat = unit->trained().size() == 1 &&
                         unit->trained()[0].tensor.is_same(unit->shard());
    std::size_t next = first;
    for (std::size_t i = 0; i < unit->names().size(); ++i) {
      const Piece piece = unit->layout().piece(i, unit->shard_rank());
      const bool is_trained = unit->leaves()[i].requires_grad();
      StatePart part;
      part.name = unit->names()[i];
      part.whole = unit->layout().shapes[i];
      part.begin = piece.begin;
      part.values = part_of(unit->shard(), piece.shard_offset, piece.numel());
      if (is_trained) {
        part.optimizer = &optimizer;
        part.slot = is_flat ? first : next++;
        part.slot_begin = is_flat ? piece.shard_offset : 0;
      }
      state.parts.push_back(std::move(part));
    }
    first += unit->trained().size();
  }
  return state;
}

}  // namespace shardbook::fsdp
