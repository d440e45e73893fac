#include "chapters/common/pipeline/stage_memory.h"

#include <algorithm>
#include <utility>

#include "core/autograd.h"
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

/// One stage, and what the engine does with a micro-batch there. Values that
/// the stages next door hold are set apart, and not counted.
class MeasuredStage {
 public:
  MeasuredStage(const StageOnShapes& what, const ActionState& state, Feed& feed,
                bool input_apart, bool output_apart)
      : what_(what),
        state_(state),
        feed_(feed),
        is_first_(what.begin == 0),
        is_last_(what.end == what.layers.size()),
        input_apart_(input_apart),
        output_apart_(output_apart),
        stage_(what.layers.on_shapes(), what.begin, what.end, init(feed)),
        takes_(with_skips(what.takes, stage_.incoming())),
        gives_(with_skips(what.gives, stage_.outgoing())) {
    defer_batch_norms(stage_);
    function_ = [this](const Tensors& inputs) {
      const Tensors outputs = stage_(inputs);
      return is_last_ ? Tensors{feed_.loss(what_.micro_batch, outputs)}
                      : outputs;
    };
  }

  ActionBytes measure() {
    feed_.end_step();
    const ActionKind kind = state_.kind;
    if (kind == ActionKind::kForward) return measured([&] { forward(); });
    forward();
    if (kind == ActionKind::kBackward) {
      return measured([&] { compute_gradients(); });
    }
    const auto input_gradient = [&] {
      const DeferWeightGradients scope(later_);
      compute_gradients();
      later_.flush();
    };
    if (kind == ActionKind::kBackwardInput) return measured(input_gradient);
    input_gradient();
    return measured([&] { later_.pop(); });
  }

 private:
  void forward() {
    received_ = is_first_ ? feed_.inputs(what_.micro_batch) : values_of(takes_);
    if (input_apart_) set_apart(received_, MemoryKind::kOptimizerState);
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
    const bool is_sent = state_.gives == Border::kOtherRank || output_apart_;
    if (!is_last_ && is_sent) set_apart(outputs, MemoryKind::kCommunication);
  }

  void compute_gradients() {
    // A gradient from this rank is there already
    const bool is_early =
        what_.early_recompute && state_.gives == Border::kOtherRank;
    if (what_.recompute && is_early) recompute();
    Tensors grads =
        is_last_ ? Tensors{Tensor::full({}, 1, loss_)} : gradients_of(gives_);
    if (what_.recompute && !is_early) recompute();
    if (state_.is_compared) compare(grads);
    set_apart(run_backward(std::exchange(run_, {}), std::move(grads)),
              MemoryKind::kCommunication);
  }

  void recompute() {
    run_ = run_forward_again(function_, received_, what_.takes, random_);
    received_.clear();
    run_.outputs.clear();
  }

  // Two sets of gradients, of weights and inputs; the graph stays for both.
  // Then, one tensor after the other, a difference and its squares.
  void compare(const Tensors& grads) {
    const ContextValue<WeightGradients*> at_once(&RankContext::weight_gradients,
                                                 nullptr);
    const double before = bytes_now(MemoryKind::kActivation);
    const Tensors parameters = stage_.parameters();
    Tensors set_aside;
    for (const Tensor& each : parameters) {
      set_aside.push_back(each.grad());
      each.set_grad(Tensor());
    }
    for (std::size_t i = 0; i < run_.needs_grad.size(); ++i) {
      if (run_.needs_grad[i]) run_.grad_outputs->push_back(grads[i]);
    }
    autograd::backward({run_.end}, {Tensor::empty({0})}, /*retain_graph=*/true);
    run_.grad_outputs->clear();
    double of_weights = 0, of_inputs = 0, largest = 0;
    const auto take = [&](const Tensor& of, double& sum) {
      const auto bytes = static_cast<double>(of.bytes());
      sum += bytes;
      largest = std::max(largest, bytes);
      of.set_grad(Tensor());
    };
    for (const Tensor& each : parameters) take(each, of_weights);
    for (const Tensor& each : run_.inputs) {
      if (each.requires_grad()) take(each, of_inputs);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].set_grad(set_aside[i]);
    }
    const MemoryStats stats = RankContext::current().device.memory();
    const auto sum = static_cast<double>(dtype_bytes(feed_.dtype()));
    compared_.activations = std::max(
        static_cast<double>(stats.peak(MemoryKind::kActivation)) + of_inputs,
        before + 2 * of_inputs + 2 * largest + sum);
    compared_.gradients =
        static_cast<double>(stats.peak(MemoryKind::kGradient)) + of_weights;
  }

  template <typename Work>
  ActionBytes measured(const Work& work) {
    give_gradients();
    RankContext::current().device.reset_peak_memory();
    work();
    const MemoryStats stats = RankContext::current().device.memory();
    ActionBytes bytes;
    bytes.activations =
        std::max(static_cast<double>(stats.peak(MemoryKind::kActivation)),
                 compared_.activations);
    bytes.gradients =
        std::max(static_cast<double>(stats.peak(MemoryKind::kGradient)),
                 compared_.gradients);
    bytes.inputs = static_cast<double>(stats.peak(MemoryKind::kInput));
    bytes.kept = bytes_now(MemoryKind::kActivation);
    bytes.inputs_kept = bytes_now(MemoryKind::kInput);
    bytes.holds_input =
        input_apart_ && bytes_now(MemoryKind::kOptimizerState) > 0;
    bytes.holds_output =
        output_apart_ && bytes_now(MemoryKind::kCommunication) > 0;
    bytes.output = forward_bytes(what_.gives);
    bytes.input_gradient = backward_bytes(what_.takes);
    for (const Tensor& each : stage_.parameters()) {
      bytes.has_gradient.push_back(each.grad().defined());
    }
    return bytes;
  }

  // The gradients that the action finds
  void give_gradients() {
    const MemoryScope kind(MemoryKind::kGradient);
    const Tensors parameters = stage_.parameters();
    SB_CHECK(parameters.size() == state_.has_gradient.size(), "layers ",
             what_.begin, " to ", what_.end - 1, ": have ", parameters.size(),
             " parameters, not ", state_.has_gradient.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].set_grad(state_.has_gradient[i] ? parameters[i].zeros_like()
                                                    : Tensor());
    }
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
  static void set_apart(const Tensors& values, MemoryKind kind) {
    for (const Tensor& each : values) {
      if (each.defined()) each.set_memory_kind(kind);
    }
  }

  const StageOnShapes& what_;
  const ActionState& state_;
  Feed& feed_;
  bool is_first_, is_last_, input_apart_, output_apart_;
  Stage stage_;
  std::vector<ValueSpec> takes_, gives_;
  StageFunction function_;
  // The micro-batch
  Tensors received_;
  RandomState random_;
  StageRun run_;
  TensorOptions loss_;
  WeightGradients later_;
  ActionBytes compared_;
};

}  // namespace

ActionBytes measure_action(const StageOnShapes& what, const ActionState& state,
                           Feed& feed) {
  // A context of its own: nobody's clock or ledger sees this
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  for (const auto& [border, spec] :
       {std::pair(state.takes, &what.takes), {state.gives, &what.gives}}) {
    SB_CHECK(border == Border::kOtherRank || spec->values.size() == 1,
             "layers ", what.begin, " to ", what.end - 1, ": exchange ",
             spec->values.size(),
             " values with a stage of the same rank; the "
             "prediction knows one");
  }
  const auto measure = [&](bool input_apart, bool output_apart) {
    return MeasuredStage(what, state, feed, input_apart, output_apart)
        .measure();
  };
  ActionBytes bytes = measure(state.takes == Border::kHeldNextDoor,
                              state.gives == Border::kHeldNextDoor);
  if (state.takes == Border::kThisRank || state.gives == Border::kThisRank) {
    const ActionBytes apart = measure(state.takes != Border::kOtherRank,
                                      state.gives != Border::kOtherRank);
    bytes.kept = apart.kept;
    bytes.holds_input = apart.holds_input;
    bytes.holds_output = apart.holds_output;
  }
  SB_CHECK(state.kind != ActionKind::kBackward || bytes.kept == 0, "layers ",
           what.begin, " to ", what.end - 1, ": keep ", bytes.kept,
           " bytes of activations after backward");
  feed.end_step();
  return bytes;
}

}  // namespace shardbook::pipeline
