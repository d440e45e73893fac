#include "chapters/common/pipeline/schedule_memory.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "chapters/common/pipeline/replay.h"

namespace shardbook::pipeline {
namespace {

/// Walks down the list and adds up.
class LevelWalk {
 public:
  explicit LevelWalk(const NeedsOf& needs_of) : needs_of_(needs_of) {}

  void perform(const Action& action) {
    if (action.kind == ActionKind::kUpdate) {
      have_.clear();
      return;
    }
    const StageNeeds& needs = needs_of_(action.micro_batch, action.chunk);
    Have& have = have_[action.chunk];
    const ActionBytes& needed = need_of(action.kind, needs, have);
    ActionBytes& kept = kept_[{action.micro_batch, action.chunk}];
    activations_ -= kept.kept;
    inputs_ -= kept.inputs_kept;
    peak_.activations =
        std::max(peak_.activations, activations_ + needed.activations);
    peak_.inputs = std::max(peak_.inputs, inputs_ + needed.inputs);
    kept = needed;
    activations_ += kept.kept;
    inputs_ += kept.inputs_kept;
    if (action.kind == ActionKind::kForward) return;
    double others = 0;
    for (const auto& [chunk, each] : have_) {
      if (chunk != action.chunk) others += each.bytes;
    }
    peak_.gradients = std::max(peak_.gradients, others + needed.gradients);
    have.of_input = true;
    have.of_weights |= action.kind != ActionKind::kBackwardInput;
    have.bytes = have.of_weights ? needs.gradients : needs.of_input;
  }
  const RankPeaks& peaks() const { return peak_; }

 private:
  /// Gradients that a chunk has.
  struct Have {
    bool of_input = false, of_weights = false;
    double bytes = 0;
  };
  const ActionBytes& need_of(ActionKind kind, const StageNeeds& needs,
                             const Have& have) {
    const auto k = static_cast<std::size_t>(kind);
    switch (kind) {
      case ActionKind::kForward:
        return needs.forward;
      case ActionKind::kBackwardWeight:
        return have.of_weights ? needs.later[k] : needs.first[k];
      case ActionKind::kBackward:
        peak_.is_open = peak_.is_open || have.of_weights != have.of_input;
        [[fallthrough]];
      default:
        return have.of_input ? needs.later[k] : needs.first[k];
    }
  }

  const NeedsOf& needs_of_;
  std::map<std::pair<int, int>, ActionBytes>
      kept_;  ///< by micro-batch and chunk
  double activations_ = 0, inputs_ = 0;
  std::map<int, Have> have_;  ///< by chunk
  RankPeaks peak_;
};

/// Chunks of the rank share a parameter, or hand values to each other.
bool shares(const Schedule& schedule, int rank, PipelineModel& model) {
  double parameters = 0, of_stages = 0;
  for (const Tensor& each : model.parameters()) parameters += each.bytes();
  for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
    Stage& stage = model.stage(schedule.stage_at(rank, chunk));
    for (const Tensor& each : stage.parameters()) of_stages += each.bytes();
  }
  bool hands_over = false;
  for (const Route& route : schedule.routes) {
    for (std::size_t s = 0; s + 1 < route.size(); ++s) {
      hands_over =
          hands_over || (route[s].rank == rank && route[s + 1].rank == rank);
    }
  }
  return parameters != of_stages || hands_over;
}

}  // namespace

RankPeaks rank_peaks(const std::vector<Action>& actions,
                     const NeedsOf& needs_of) {
  LevelWalk walk(needs_of);
  for (const Action& each : actions) walk.perform(each);
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
  const double states = options.optimizer != "sgd"
                            ? 2
                            : (options.optimizer_options.momentum > 0 ? 1 : 0);
  // Moments of 16-bit parameters are f32
  const double state_bytes = options.dtype == DType::kF64 ? 8 : 4;
  bill[MemoryKind::kOptimizerState] = states * elements * state_bytes;
  return bill;
}

MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed,
                         const EngineOptions& engine) {
  Tensors buffers;
  for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
    Stage& stage = model.stage(schedule.stage_at(rank, chunk));
    for (const Tensor& each : stage.buffers()) buffers.push_back(each);
  }
  MemoryBill bill = stage_bill(options, model.parameters(), buffers);
  if (options.steps == 0) return bill;
  if (!schedule.flushes) {
    bill[MemoryKind::kParameter] *=
        max_versions(schedule)[static_cast<std::size_t>(rank)];
  }
  if (shares(schedule, rank, model)) return bill;

  // One measurement per stage, number of rows, and what is kept of them
  const Recomputed recomputed(schedule, rank, engine.recompute);
  std::map<std::int64_t, std::vector<LayerInput>> specs;
  std::map<std::tuple<int, std::int64_t, bool>, StageNeeds> needs;
  const NeedsOf needs_of = [&](int b, int chunk) -> const StageNeeds& {
    const std::int64_t rows = feed.piece(b).rows;
    const int stage = schedule.stage_at(rank, chunk);
    const bool is_dropped = recomputed.contains(b, chunk);
    const auto found = needs.find({stage, rows, is_dropped});
    if (found != needs.end()) return found->second;
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
    return needs[{stage, rows, is_dropped}] = measure_stage(what, feed);
  };
  const RankPeaks peaks =
      rank_peaks(schedule.actions[static_cast<std::size_t>(rank)], needs_of);
  if (peaks.is_open) return bill;
  bill[MemoryKind::kActivation] = peaks.activations;
  bill[MemoryKind::kInput] = peaks.inputs;
  bill[MemoryKind::kGradient] = peaks.gradients;
  return bill;
}

}  // namespace shardbook::pipeline
