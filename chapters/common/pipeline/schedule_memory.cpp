#include "chapters/common/pipeline/schedule_memory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/stage_memory.h"

namespace shardbook::pipeline {
namespace {

double now(MemoryKind kind) {
  return static_cast<double>(
      RankContext::current().device.memory().current(kind));
}

/// Bytes in one action, above those of others.
struct Needed {
  double activations = 0, inputs = 0, gradients = 0;  ///< peaks
  double kept = 0, inputs_kept = 0;                   ///< afterwards
};

/// What the actions of a micro-batch need at one stage. A parameter's first
/// gradient of a step becomes its gradient; later ones are computed beside it.
struct StageNeeds {
  Needed forward, first[4], later[4];  ///< by ActionKind
  double gradients = 0;                ///< of all parameters of the stage
  double of_input = 0;                 ///< those that I computes: biases, norms
};

/// A stage on shapes.
class OnShapes {
 public:
  OnShapes(const LayerList& layers, const std::vector<int>& cuts, int stage,
           Feed& feed, const std::vector<LayerInput>& specs, int micro_batch)
      : feed_(feed),
        micro_batch_(micro_batch),
        takes_(specs[0]),
        gives_(specs[1]),
        is_first_(stage == 0),
        is_last_(static_cast<std::size_t>(stage) + 2 == cuts.size()),
        stage_(layers, cuts[static_cast<std::size_t>(stage)],
               cuts[static_cast<std::size_t>(stage) + 1], init(feed)) {}

  Needed forward() {
    return measure([&] {
      const Tensors received =
          is_first_ ? feed_.inputs(micro_batch_) : values_of(takes_);
      run_ = run_forward(
          [&](const Tensors& inputs) {
            Tensors outputs = stage_(inputs);
            return is_last_ ? Tensors{feed_.loss(micro_batch_, outputs)}
                            : outputs;
          },
          received, takes_);
      for (const Tensor& each : run_.outputs) {
        loss_ = each.options();
        if (!is_last_) each.set_memory_kind(MemoryKind::kCommunication);
      }
      run_.outputs.clear();
    });
  }

  Needed backward(ActionKind kind) {
    return measure([&] {
      if (kind == ActionKind::kBackwardWeight) {
        later_.pop();
        return;
      }
      Tensors grads =
          is_last_ ? Tensors{Tensor::full({}, 1, loss_)} : values_of(gives_);
      if (kind == ActionKind::kBackward) {
        send(run_backward(std::exchange(run_, {}), std::move(grads)));
        return;
      }
      const DeferWeightGradients scope(later_);
      send(run_backward(std::exchange(run_, {}), std::move(grads)));
      later_.flush();
    });
  }

 private:
  static InitOptions init(const Feed& feed) {
    InitOptions init;
    init.dtype = feed.dtype();
    return init;
  }
  static Tensors values_of(const LayerInput& spec) {
    Tensors values;
    for (const ValueSpec& each : spec.values) {
      values.push_back(Tensor::empty(each.shape, {each.dtype, Device()}));
    }
    return values;
  }
  static void send(const Tensors& values) {
    for (const Tensor& each : values) {
      if (each.defined()) each.set_memory_kind(MemoryKind::kCommunication);
    }
  }
  template <typename Work>
  static Needed measure(const Work& work) {
    RankContext::current().device.reset_peak_memory();
    work();
    const MemoryStats stats = RankContext::current().device.memory();
    Needed needed;
    needed.activations =
        static_cast<double>(stats.peak(MemoryKind::kActivation));
    needed.gradients = static_cast<double>(stats.peak(MemoryKind::kGradient));
    needed.inputs = static_cast<double>(stats.peak(MemoryKind::kInput));
    needed.kept = now(MemoryKind::kActivation);
    needed.inputs_kept = now(MemoryKind::kInput);
    return needed;
  }

  Feed& feed_;
  int micro_batch_;
  LayerInput takes_, gives_;
  bool is_first_, is_last_;
  Stage stage_;
  StageRun run_;
  TensorOptions loss_;
  WeightGradients later_;
};

StageNeeds measure_stage(const PipelineModel& model, int stage, Feed& feed,
                         const std::vector<LayerInput>& specs,
                         int micro_batch) {
  // A context of its own: nobody's clock or ledger sees this
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  StageNeeds needs;
  {
    OnShapes shapes(model.layers(), model.layout().cuts, stage, feed, specs,
                    micro_batch);
    needs.forward = shapes.forward();
    needs.first[1] = shapes.backward(ActionKind::kBackward);
    shapes.forward();
    needs.later[1] = shapes.backward(ActionKind::kBackward);
    shapes.forward();
    needs.later[2] = shapes.backward(ActionKind::kBackwardInput);
    needs.later[3] = shapes.backward(ActionKind::kBackwardWeight);
    needs.gradients = now(MemoryKind::kGradient);
  }
  OnShapes shapes(model.layers(), model.layout().cuts, stage, feed, specs,
                  micro_batch);
  shapes.forward();
  needs.first[2] = shapes.backward(ActionKind::kBackwardInput);
  needs.of_input = now(MemoryKind::kGradient);
  needs.first[3] = shapes.backward(ActionKind::kBackwardWeight);
  return needs;
}

/// Walks down the list and adds up.
class LevelWalk {
 public:
  using NeedsOf = std::function<const StageNeeds&(int micro_batch, int chunk)>;
  explicit LevelWalk(NeedsOf needs_of) : needs_of_(std::move(needs_of)) {}

  void perform(const Action& action) {
    if (action.kind == ActionKind::kUpdate) {
      have_.clear();
      return;
    }
    const StageNeeds& needs = needs_of_(action.micro_batch, action.chunk);
    Have& have = have_[action.chunk];
    const Needed& needed = need_of(action.kind, needs, have);
    Needed& kept = kept_[{action.micro_batch, action.chunk}];
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
  const Needed& peak() const { return peak_; }
  /// A B came between an I and its W: not among what was measured.
  bool is_open() const { return is_open_; }

 private:
  /// Gradients that a chunk has.
  struct Have {
    bool of_input = false, of_weights = false;
    double bytes = 0;
  };
  const Needed& need_of(ActionKind kind, const StageNeeds& needs,
                        const Have& have) {
    const auto k = static_cast<std::size_t>(kind);
    switch (kind) {
      case ActionKind::kForward:
        return needs.forward;
      case ActionKind::kBackwardWeight:
        return have.of_weights ? needs.later[k] : needs.first[k];
      case ActionKind::kBackward:
        is_open_ = is_open_ || have.of_weights != have.of_input;
        [[fallthrough]];
      default:
        return have.of_input ? needs.later[k] : needs.first[k];
    }
  }

  NeedsOf needs_of_;
  std::map<std::pair<int, int>, Needed> kept_;  ///< by micro-batch and chunk
  double activations_ = 0, inputs_ = 0;
  std::map<int, Have> have_;  ///< by chunk
  Needed peak_;
  bool is_open_ = false;
};

}  // namespace

MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed) {
  MemoryBill bill = stage_bill(options, model.parameters());
  if (options.steps == 0) return bill;
  if (!schedule.flushes) {
    bill[MemoryKind::kParameter] *=
        max_versions(schedule)[static_cast<std::size_t>(rank)];
  }

  // One stage per chunk; neighbours elsewhere, parameters of their own
  const int chunks = schedule.num_chunks(rank);
  double parameters = 0, of_stages = 0;
  for (const Tensor& each : model.parameters()) parameters += each.bytes();
  for (int chunk = 0; chunk < chunks; ++chunk) {
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
  if (parameters != of_stages || hands_over) return bill;

  const auto& actions = schedule.actions[static_cast<std::size_t>(rank)];
  std::map<std::int64_t, std::vector<LayerInput>> specs;
  std::map<std::pair<int, std::int64_t>, StageNeeds> needs;
  LevelWalk walk([&](int b, int chunk) -> const StageNeeds& {
    const std::int64_t rows = feed.piece(b).rows;
    const int stage = schedule.stage_at(rank, chunk);
    const auto found = needs.find({stage, rows});
    if (found != needs.end()) return found->second;
    auto& all = specs[rows];
    if (all.empty()) {
      all = trace_shapes(model.layers(), feed.example(rows), feed.dtype());
    }
    const auto at = static_cast<std::size_t>(stage);
    const std::vector<LayerInput> ends = {
        all[static_cast<std::size_t>(model.layout().cuts[at])],
        all[static_cast<std::size_t>(model.layout().cuts[at + 1])]};
    return needs[{stage, rows}] = measure_stage(model, stage, feed, ends, b);
  });
  for (const Action& each : actions) walk.perform(each);
  if (walk.is_open()) return bill;
  bill[MemoryKind::kActivation] = walk.peak().activations;
  bill[MemoryKind::kInput] = walk.peak().inputs;
  bill[MemoryKind::kGradient] = walk.peak().gradients;
  return bill;
}

}  // namespace shardbook::pipeline
