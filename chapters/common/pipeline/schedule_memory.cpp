#include "chapters/common/pipeline/schedule_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "chapters/common/pipeline/replay.h"

namespace shardbook::pipeline {
namespace {

/// A value that a stage of this rank hands to the next one, also here.
struct HandedOver {
  double bytes = 0;
  bool is_waiting = false;  ///< made, and not yet taken
  bool is_held_before = false, is_held_behind = false;
  bool is_here() const {
    return is_waiting || is_held_before || is_held_behind;
  }
};

/// Walks down the list and adds up.
class LevelWalk {
 public:
  LevelWalk(const Schedule& schedule, int rank,
            const RankParameters& parameters, const NeedsOf& needs_of)
      : schedule_(schedule),
        rank_(rank),
        parameters_(parameters),
        needs_of_(needs_of),
        has_gradient_(parameters.bytes.size()) {}

  void perform(const Action& action) {
    if (action.kind == ActionKind::kUpdate) {
      has_gradient_.assign(has_gradient_.size(), false);
      return;
    }
    const int b = action.micro_batch;
    const int stage = schedule_.stage_at(rank_, action.chunk);
    const bool is_forward = action.kind == ActionKind::kForward;
    HandedOver none;
    HandedOver& taken = is_here(b, stage - 1) ? values_[{b, stage}] : none;
    HandedOver& given = is_here(b, stage + 1) ? values_[{b, stage + 1}] : none;

    // What this action finds, and what it frees or holds: no longer the others'
    ActionState state;
    state.kind = action.kind;
    if (&taken != &none) {
      state.takes =
          taken.is_held_before ? Border::kHeldNextDoor : Border::kThisRank;
    }
    if (&given != &none) {
      state.gives =
          given.is_held_behind ? Border::kHeldNextDoor : Border::kThisRank;
    }
    for (const std::size_t i : of(action.chunk)) {
      state.has_gradient.push_back(has_gradient_[i]);
    }
    const ActionBytes needed = needs_of_(action, state);
    taken.is_waiting = taken.is_held_behind = given.is_held_before = false;
    kept_.erase({b, stage});
    if (!is_forward) gradients_.erase({b, stage + 1});
    note_peaks(action.chunk, needed);

    // What it leaves
    kept_[{b, stage}] = {needed.kept, needed.inputs_kept};
    taken.is_held_behind = needed.holds_input;
    given.is_held_before = needed.holds_output;
    if (is_forward) {
      given.bytes = needed.output;
      given.is_waiting = true;
    } else if (action.kind != ActionKind::kBackwardWeight && &taken != &none) {
      gradients_[{b, stage}] = needed.input_gradient;
    }
    for (std::size_t i = 0; i < of(action.chunk).size(); ++i) {
      has_gradient_[of(action.chunk)[i]] = needed.has_gradient[i];
    }
  }
  const RankPeaks& peaks() const { return peak_; }

 private:
  struct Kept {
    double activations = 0, inputs = 0;
  };
  using Key = std::pair<int, int>;  ///< micro-batch and stage

  bool is_here(int b, int stage) const {
    return stage >= 0 && stage < schedule_.num_stages &&
           schedule_.place(b, stage).rank == rank_;
  }
  const std::vector<std::size_t>& of(int chunk) const {
    return parameters_.of_chunk[static_cast<std::size_t>(chunk)];
  }

  void note_peaks(int chunk, const ActionBytes& needed) {
    double activations = needed.activations, inputs = needed.inputs;
    for (const auto& [key, kept] : kept_) {
      activations += kept.activations;
      inputs += kept.inputs;
    }
    for (const auto& [key, value] : values_) {
      if (value.is_here()) activations += value.bytes;
    }
    for (const auto& [key, bytes] : gradients_) activations += bytes;
    double gradients = needed.gradients;
    for (std::size_t i = 0; i < has_gradient_.size(); ++i) {
      const auto& here = of(chunk);
      const bool is_other =
          std::find(here.begin(), here.end(), i) == here.end();
      if (has_gradient_[i] && is_other) gradients += parameters_.bytes[i];
    }
    peak_.activations = std::max(peak_.activations, activations);
    peak_.inputs = std::max(peak_.inputs, inputs);
    peak_.gradients = std::max(peak_.gradients, gradients);
  }

  const Schedule& schedule_;
  const int rank_;
  const RankParameters& parameters_;
  const NeedsOf& needs_of_;
  std::vector<bool> has_gradient_;  ///< by parameter of the rank
  std::map<Key, Kept> kept_;
  std::map<Key, HandedOver> values_;  ///< by the stage that takes them
  std::map<Key, double> gradients_;   ///< of those, until the maker takes them
  RankPeaks peak_;
};

RankParameters parameters_of(const Schedule& schedule, int rank,
                             PipelineModel& model) {
  RankParameters all;
  const Tensors& mine = model.parameters();
  for (const Tensor& each : mine) {
    all.bytes.push_back(static_cast<double>(each.bytes()));
  }
  for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
    std::vector<std::size_t> here;
    Stage& stage = model.stage(schedule.stage_at(rank, chunk));
    for (const Tensor& each : stage.parameters()) {
      const auto found =
          std::find_if(mine.begin(), mine.end(),
                       [&](const Tensor& p) { return p.is_same(each); });
      here.push_back(static_cast<std::size_t>(found - mine.begin()));
    }
    all.of_chunk.push_back(std::move(here));
  }
  return all;
}

/// Stages and micro-batches whose backward finds newer weights than their
/// forward read.
std::set<std::pair<int, int>> stale_backwards(const Schedule& schedule) {
  std::set<std::pair<int, int>> stale;
  for (const VersionRecord& each : versions(schedule)) {
    if (each.read != each.applied_to) {
      stale.emplace(each.stage, each.micro_batch);
    }
  }
  return stale;
}

}  // namespace

RankPeaks rank_peaks(const Schedule& schedule, int rank,
                     const RankParameters& parameters,
                     const NeedsOf& needs_of) {
  LevelWalk walk(schedule, rank, parameters, needs_of);
  for (const Action& each : schedule.actions[static_cast<std::size_t>(rank)]) {
    walk.perform(each);
  }
  return walk.peaks();
}

MemoryBill stage_bill(const Options& options, const Tensors& parameters,
                      const Tensors& buffers) {
  MemoryBill bill;
  // How long a message waits for its receiver depends on who is late
  bill[MemoryKind::kCommunication] = kNoClaim;
  double elements = 0, bytes = 0;
  for (const Tensor& parameter : parameters) {
    elements += static_cast<double>(parameter.numel());
    bytes += static_cast<double>(parameter.bytes());
  }
  for (const Tensor& buffer : buffers) {
    bytes += static_cast<double>(buffer.bytes());
  }
  bill[MemoryKind::kParameter] = bytes;
  bill[MemoryKind::kOptimizerState] = 0;
  if (options.steps == 0) return bill;
  const double states = optimizer_states(options);
  // Moments of 16-bit parameters are f32
  const double state_bytes = options.dtype == DType::kF64 ? 8 : 4;
  bill[MemoryKind::kOptimizerState] = states * elements * state_bytes;
  return bill;
}

MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed,
                         const EngineOptions& engine, bool stashes) {
  Tensors buffers;
  for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
    Stage& stage = model.stage(schedule.stage_at(rank, chunk));
    for (const Tensor& each : stage.buffers()) buffers.push_back(each);
  }
  MemoryBill bill = stage_bill(options, model.parameters(), buffers);
  if (options.steps == 0) {
    bill[MemoryKind::kInput] = bill[MemoryKind::kGradient] =
        bill[MemoryKind::kActivation] = 0;
    return bill;
  }
  if (!schedule.flushes) {
    bill[MemoryKind::kParameter] *=
        max_versions(schedule)[static_cast<std::size_t>(rank)];
  }

  // One measurement per stage, number of rows, and what the action finds
  const Recomputed recomputed(schedule, rank, engine.recompute);
  std::set<std::pair<int, int>> compared;
  if (!stashes) compared = stale_backwards(schedule);
  std::map<std::int64_t, std::vector<LayerInput>> specs;
  std::map<std::tuple<int, std::int64_t, bool, ActionState>, ActionBytes> known;
  const NeedsOf needs_of = [&](const Action& action, ActionState state) {
    const int b = action.micro_batch;
    const std::int64_t rows = feed.piece(b).rows;
    const int stage = schedule.stage_at(rank, action.chunk);
    const bool is_dropped = recomputed.contains(b, action.chunk);
    const bool is_backward = action.kind == ActionKind::kBackward ||
                             action.kind == ActionKind::kBackwardInput;
    state.is_compared = is_backward && compared.count({stage, b}) != 0;
    const auto found = known.find({stage, rows, is_dropped, state});
    if (found != known.end()) return found->second;
    auto& all = specs[rows];
    if (all.empty()) {
      all = trace_shapes(model.layers(), feed.example(rows), feed.dtype());
    }
    const auto& cuts = model.layout().cuts;
    const int begin = cuts[static_cast<std::size_t>(stage)];
    const int end = cuts[static_cast<std::size_t>(stage) + 1];
    const StageOnShapes what = {model.layers(),
                                begin,
                                end,
                                all[static_cast<std::size_t>(begin)],
                                all[static_cast<std::size_t>(end)],
                                b,
                                is_dropped,
                                engine.early_recompute};
    const ActionBytes bytes = measure_action(what, state, feed);
    known[{stage, rows, is_dropped, state}] = bytes;
    return bytes;
  };
  const RankPeaks peaks = rank_peaks(
      schedule, rank, parameters_of(schedule, rank, model), needs_of);
  bill[MemoryKind::kActivation] = peaks.activations;
  bill[MemoryKind::kInput] = peaks.inputs;
  bill[MemoryKind::kGradient] = peaks.gradients;
  return bill;
}

}  // namespace shardbook::pipeline
