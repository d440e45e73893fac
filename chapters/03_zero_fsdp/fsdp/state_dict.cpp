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

bool keeps(FullyShardedDataParallel& fsdp, const FullStateDictOptions& setup) {
  return !setup.rank0_only || fsdp.group().rank() == 0;
}

/// This rank's pieces of a unit's parameters. With an optimizer, the unit's state
/// begins in slot `first`; a flat shard has one slot for all of them.
std::vector<StatePart> parts_of(const FlatParameter& unit,
                                Optimizer* optimizer = nullptr,
                                std::size_t first = 0) {
  const auto& trained = unit.trained();
  const bool is_flat =
      trained.size() == 1 && trained[0].tensor.is_same(unit.shard());
  std::vector<StatePart> parts;
  for (std::size_t i = 0; i < unit.names().size(); ++i) {
    const OwnedPart own = unit.own_part(i);
    StatePart& part = parts.emplace_back();
    part.name = unit.names()[i];
    part.whole = unit.layout().shapes[i];
    part.begin = own.begin;
    part.values = own.of_shard(unit.shard());
    if (optimizer == nullptr || !unit.leaves()[i].requires_grad()) continue;
    part.optimizer = optimizer;
    part.slot = is_flat ? first : first++;
    part.slot_begin = is_flat ? own.shard_begin : 0;
  }
  return parts;
}

/// One state tensor of a unit in the layout of its shard; undefined if no part
/// was updated.
Tensor packed_state(const FlatParameter& unit,
                    const std::vector<StatePart>& parts, std::size_t which) {
  Tensor packed;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].optimizer == nullptr) continue;
    const OptimizerSlot& slot = parts[i].optimizer->slots()[parts[i].slot];
    if (which >= slot.state.size()) continue;
    if (!packed.defined()) {
      MemoryScope kind(MemoryKind::kOptimizerState);
      packed = Tensor::zeros(unit.shard().shape(), slot.state[which].options());
    }
    const OwnedPart own = unit.own_part(i);
    own.of_shard(packed).copy_from(
        slot.state[which].flat_view(parts[i].slot_begin, {own.numel}));
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
  // In the model's order of definition
  std::vector<NamedTensor> ordered;
  for (const NamedTensor& parameter : fsdp.module().named_parameters()) {
    const auto it = found.find(parameter.name);
    if (it != found.end()) ordered.push_back({it->first, it->second});
  }
  return ordered;
}

void load_full_state_dict(FullyShardedDataParallel& fsdp,
                          const std::vector<NamedTensor>& state) {
  std::vector<StatePart> pieces;
  for (const NamedTensor& entry : state) {
    StatePart& piece = pieces.emplace_back();
    piece.name = entry.name;
    piece.whole = entry.tensor.shape();
    piece.values = entry.tensor;
  }
  load_sharded_state_dict(fsdp, pieces);
}

// --- Sharded -------------------------------------------------------------------

std::vector<StatePart> sharded_state_dict(FullyShardedDataParallel& fsdp) {
  std::vector<StatePart> pieces;
  for (const FlatParameter* unit : fsdp.units()) {
    for (StatePart& part : parts_of(*unit)) {
      if (part.values.numel() == 0) continue;
      part.values = copy_of(part.values, /*to_host=*/true);
      pieces.push_back(std::move(part));
    }
  }
  return pieces;
}

void load_sharded_state_dict(FullyShardedDataParallel& fsdp,
                             const std::vector<StatePart>& pieces) {
  fsdp.reshard_all();
  std::map<std::string, std::multimap<std::int64_t, const StatePart*>> by_name;
  for (const StatePart& piece : pieces) {
    by_name[piece.name].emplace(piece.begin, &piece);
  }
  for (const FlatParameter* unit : fsdp.units()) {
    for (const StatePart& own : parts_of(*unit)) {
      // Copy the overlap of each piece with this rank's
      const std::int64_t own_end = own.begin + own.values.numel();
      std::int64_t covered = own.begin;
      for (const auto& [begin, piece] : by_name[own.name]) {
        SB_CHECK(piece->whole == own.whole, "fsdp: '", own.name, "' has shape ",
                 shape_text(piece->whole), " in the state, the model needs ",
                 shape_text(own.whole));
        const std::int64_t end =
            std::min(own_end, begin + piece->values.numel());
        if (begin > covered || end <= covered) continue;
        const Shape overlap{end - covered};
        own.values.flat_view(covered - own.begin, overlap)
            .copy_from(piece->values.flat_view(covered - begin, overlap));
        covered = end;
      }
      SB_CHECK(covered >= own_end, "fsdp: the state has no element ", covered,
               " of '", own.name, "' ", shape_text(own.whole),
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
    const std::vector<StatePart> parts = parts_of(*unit, &optimizer, first);
    first += unit->trained().size();
    for (std::size_t s = 0; s < names.size(); ++s) {
      const Tensor packed = packed_state(*unit, parts, s);
      if (!packed.defined()) continue;
      const Tensor full = unit->gather(packed, names[s]);
      if (!keeps(fsdp, options)) continue;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].optimizer == nullptr) continue;
        ParameterState& entry = all[parts[i].name];
        entry.step = updates_of(parts[i]);
        entry.state.push_back(
            {names[s], copy_of(unit->view(full, i), options.offload_to_cpu)});
      }
    }
  }
  return all;
}

void load_full_optim_state_dict(
    FullyShardedDataParallel& fsdp, Optimizer& optimizer,
    const std::map<std::string, ParameterState>& state) {
  check_optimizer(fsdp, optimizer);
  std::size_t first = 0;
  for (const FlatParameter* unit : fsdp.units()) {
    const OptimizerSlot* last = nullptr;
    for (const StatePart& part : parts_of(*unit, &optimizer, first)) {
      if (part.optimizer == nullptr) continue;
      OptimizerSlot& slot = optimizer.slots()[part.slot];
      const auto entry = state.find(part.name);
      const std::int64_t step = entry == state.end() ? 0 : entry->second.step;
      SB_CHECK(&slot != last || slot.step == step, "fsdp: '", part.name,
               "' was updated ", step, " times, others of unit '", unit->name(),
               "' ", slot.step, "; set use_orig_params for a step count each");
      last = &slot;
      slot.step = step;
      if (entry == state.end()) continue;

      // This rank's piece of each whole tensor
      make_optimizer_state(part, step);
      for (const NamedTensor& whole : entry->second.state) {
        for (const StateField& own : fields_of(part)) {
          if (own.name != whole.name) continue;
          own.values.copy_from(
              whole.tensor.flat_view(part.begin, {own.values.numel()}));
        }
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
    for (StatePart& part : parts_of(*unit, &optimizer, first)) {
      state.parts.push_back(std::move(part));
    }
    first += unit->trained().size();
  }
  return state;
}

}  // namespace shardbook::fsdp
