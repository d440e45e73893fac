#include "chapters/common/pipeline/stage_memory.h"

#include <utility>

#include "core/check.h"
#include "core/layers.h"
#include "core/weight_gradients.h"

namespace shardbook::pipeline {
namespace {

double bytes_now(MemoryKind kind) {
  return static_cast<double>(
      RankContext::current().device.memory().current(kind));
}

std::vector<ValueSpec> with_skips(const LayerInput& spec,
                                  const std::vector<std::string>& skips) {
  std::vector<ValueSpec> all = spec.values;
  for (const std::string& name : skips) all.push_back(spec.skips.at(name));
  return all;
}

/// One stage, and what the engine does with a micro-batch there.
class MeasuredStage {
 public:
  MeasuredStage(const StageOnShapes& what, Feed& feed)
      : what_(what),
        feed_(feed),
        is_first_(what.begin == 0),
        is_last_(what.end == what.layers.size()),
        stage_(what.layers, what.begin, what.end, init(feed)),
        takes_(with_skips(what.takes, stage_.incoming())),
        gives_(with_skips(what.gives, stage_.outgoing())) {
    defer_batch_norms(stage_);
    function_ = [this](const Tensors& inputs) {
      const Tensors outputs = stage_(inputs);
      return is_last_ ? Tensors{feed_.loss(what_.micro_batch, outputs)}
                      : outputs;
    };
  }

  ActionBytes forward() {
    feed_.end_step();
    return measure([&] {
      received_ =
          is_first_ ? feed_.inputs(what_.micro_batch) : values_of(takes_);
      random_ = RankContext::current().random;
      Tensors outputs;
      if (what_.recompute) {
        const NoGrad no_grad;
        outputs = function_(received_);
      } else {
        run_ = run_forward(function_, received_, what_.takes);
        received_.clear();
        outputs = std::exchange(run_.outputs, {});
      }
      loss_ = outputs[0].options();
      if (!is_last_) send(outputs);
    });
  }

  ActionBytes backward(ActionKind kind) {
    return measure([&] {
      if (kind == ActionKind::kBackwardWeight) {
        later_.pop();
        return;
      }
      if (kind == ActionKind::kBackward) {
        compute_gradients();
        return;
      }
      const DeferWeightGradients scope(later_);
      compute_gradients();
      later_.flush();
    });
  }

 private:
  void compute_gradients() {
    if (what_.recompute && what_.early_recompute) recompute();
    Tensors grads =
        is_last_ ? Tensors{Tensor::full({}, 1, loss_)} : gradients_of(gives_);
    if (what_.recompute && !what_.early_recompute) recompute();
    send(run_backward(std::exchange(run_, {}), std::move(grads)));
  }

  void recompute() {
    run_ = run_forward_again(function_, received_, what_.takes, random_);
    received_.clear();
    run_.outputs.clear();
  }

  static InitOptions init(const Feed& feed) {
    InitOptions init;
    init.dtype = feed.dtype();
    return init;
  }
  static Tensor value_of(const ValueSpec& spec) {
    return Tensor::empty(spec.shape, {spec.dtype, Device()});
  }
  static Tensors values_of(const std::vector<ValueSpec>& specs) {
    Tensors values;
    for (const ValueSpec& each : specs) values.push_back(value_of(each));
    return values;
  }
  static Tensors gradients_of(const std::vector<ValueSpec>& specs) {
    Tensors grads;
    for (const ValueSpec& each : specs) {
      grads.push_back(each.needs_grad ? value_of(each) : Tensor());
    }
    return grads;
  }
  static void send(const Tensors& values) {
    for (const Tensor& each : values) {
      if (each.defined()) each.set_memory_kind(MemoryKind::kCommunication);
    }
  }
  template <typename Work>
  static ActionBytes measure(const Work& work) {
    RankContext::current().device.reset_peak_memory();
    work();
    const MemoryStats stats = RankContext::current().device.memory();
    ActionBytes bytes;
    bytes.activations =
        static_cast<double>(stats.peak(MemoryKind::kActivation));
    bytes.gradients = static_cast<double>(stats.peak(MemoryKind::kGradient));
    bytes.inputs = static_cast<double>(stats.peak(MemoryKind::kInput));
    bytes.kept = bytes_now(MemoryKind::kActivation);
    bytes.inputs_kept = bytes_now(MemoryKind::kInput);
    return bytes;
  }

  const StageOnShapes& what_;
  Feed& feed_;
  bool is_first_, is_last_;
  Stage stage_;
  std::vector<ValueSpec> takes_, gives_;
  StageFunction function_;
  // The micro-batch
  Tensors received_;
  RandomState random_;
  StageRun run_;
  TensorOptions loss_;
  WeightGradients later_;
};

}  // namespace

StageNeeds measure_stage(const StageOnShapes& what, Feed& feed) {
  // A context of its own: nobody's clock or ledger sees this
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  StageNeeds needs;
  {
    MeasuredStage stage(what, feed);
    needs.forward = stage.forward();
    needs.first[1] = stage.backward(ActionKind::kBackward);
    SB_CHECK(needs.first[1].kept == 0, "layers ", what.begin, " to ",
             what.end - 1, ": keep ", needs.first[1].kept,
             " bytes of activations after backward");
    stage.forward();
    needs.later[1] = stage.backward(ActionKind::kBackward);
    stage.forward();
    needs.later[2] = stage.backward(ActionKind::kBackwardInput);
    needs.later[3] = stage.backward(ActionKind::kBackwardWeight);
    needs.gradients = bytes_now(MemoryKind::kGradient);
  }
  {
    MeasuredStage stage(what, feed);
    stage.forward();
    needs.first[2] = stage.backward(ActionKind::kBackwardInput);
    needs.of_input = bytes_now(MemoryKind::kGradient);
    needs.first[3] = stage.backward(ActionKind::kBackwardWeight);
  }
  feed.end_step();
  return needs;
}

}  // namespace shardbook::pipeline
