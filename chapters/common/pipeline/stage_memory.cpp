#include "chapters/common/pipeline/stage_memory.h"

#include <algorithm>
#include <utility>

#include "chapters/common/pipeline/pipeline.h"
#include "core/check.h"

namespace shardbook {
namespace {

double bytes_now(MemoryKind kind) {
  return static_cast<double>(
      RankContext::current().device.memory().current(kind));
}

double peak(MemoryKind kind) {
  return static_cast<double>(RankContext::current().device.memory().peak(kind));
}

Tensors values_of(const std::vector<ValueSpec>& specs, MemoryKind kind) {
  const MemoryScope scope(kind);
  Tensors values;
  for (const ValueSpec& spec : specs) {
    values.push_back(Tensor::empty(spec.shape, {spec.dtype, Device()}));
  }
  return values;
}

std::vector<ValueSpec> with_skips(const LayerInput& spec,
                                  const std::vector<std::string>& skips) {
  std::vector<ValueSpec> all = spec.values;
  for (const std::string& name : skips) all.push_back(spec.skips.at(name));
  return all;
}

// One stage, and what a rank does with a micro-batch there.
class Measured {
 public:
  Measured(const LayerList& layers, int begin, int end,
           const std::vector<LayerInput>& specs,
           const StageMemoryOptions& options)
      : options_(options),
        is_first_(begin == 0),
        stage_(layers, begin, end, init(options)),
        in_(specs[static_cast<std::size_t>(begin)]),
        inputs_(with_skips(in_, stage_.incoming())),
        outputs_(with_skips(specs[static_cast<std::size_t>(end)],
                            stage_.outgoing())) {
    defer_batch_norms(stage_);
    function_ = [this](const Tensors& inputs) {
      const Tensors outputs = stage_(inputs);
      return options_.loss ? Tensors{options_.loss(outputs)} : outputs;
    };
  }

  void forward() {
    received_ = values_of(
        inputs_, is_first_ ? MemoryKind::kInput : MemoryKind::kActivation);
    random_ = RankContext::current().random;
    if (options_.recompute) {
      const NoGrad no_grad;
      send(function_(received_));
    } else {
      run_ = run_forward(function_, received_, in_);
      received_.clear();
      send(std::exchange(run_.outputs, {}));
    }
  }

  void backward() {
    if (options_.recompute && options_.early_recompute) recompute();
    Tensors grads = receive_gradients();
    if (options_.recompute && !options_.early_recompute) recompute();
    run_backward(std::exchange(run_, {}), std::move(grads));
  }

 private:
  void recompute() {
    run_ = run_forward_again(function_, received_, in_, random_);
    received_.clear();
    run_.outputs.clear();
  }

  Tensors receive_gradients() {
    Tensors grads;
    if (options_.loss) {
      grads = {Tensor::full({}, 1, {loss_dtype_, Device()})};
    } else {
      for (const ValueSpec& spec : outputs_) {
        grads.push_back(spec.needs_grad
                            ? values_of({spec}, MemoryKind::kActivation)[0]
                            : Tensor());
      }
    }
    return grads;
  }

  static InitOptions init(const StageMemoryOptions& options) {
    InitOptions init;
    init.dtype = options.dtype;
    return init;
  }

  void send(const Tensors& values) {
    loss_dtype_ = values[0].dtype();
    for (const Tensor& value : values) {
      value.set_memory_kind(MemoryKind::kCommunication);
    }
  }

  const StageMemoryOptions& options_;
  bool is_first_;
  Stage stage_;
  const LayerInput& in_;
  std::vector<ValueSpec> inputs_, outputs_;
  StageFunction function_;
  // The micro-batch
  Tensors received_;
  DType loss_dtype_ = DType::kF32;
  RandomState random_;
  StageRun run_;
};

}  // namespace

MicroBatchMemory measure_micro_batch(const LayerList& layers, int begin,
                                     int end,
                                     const std::vector<LayerInput>& specs,
                                     const StageMemoryOptions& options) {
  // A context of its own: nobody's clock or ledger sees this
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  Measured stage(layers, begin, end, specs, options);
  MicroBatchMemory memory;
  const auto measure = [&](const auto& work, double& activations,
                           double* gradients) {
    context.device.reset_peak_memory();
    work();
    activations = peak(MemoryKind::kActivation);
    if (gradients != nullptr) *gradients = peak(MemoryKind::kGradient);
  };
  measure([&] { stage.forward(); }, memory.forward_peak, nullptr);
  memory.kept = bytes_now(MemoryKind::kActivation);
  measure([&] { stage.backward(); }, memory.first_backward_peak,
          &memory.first_gradients);
  SB_CHECK(bytes_now(MemoryKind::kActivation) == 0, "layers ", begin, " to ",
           end - 1, ": keep ", bytes_now(MemoryKind::kActivation),
           " bytes of activations after backward");
  stage.forward();
  measure([&] { stage.backward(); }, memory.later_backward_peak,
          &memory.later_gradients);
  return memory;
}

StagePeaks stage_peaks(
    const std::vector<StageEvent>& events,
    const std::function<const MicroBatchMemory&(int)>& memory_of) {
  StagePeaks peaks;
  double kept = 0;
  bool have_gradients = false;
  for (const StageEvent& event : events) {
    const MicroBatchMemory& each = memory_of(event.micro_batch);
    if (!event.is_backward) {
      peaks.activations = std::max(peaks.activations, kept + each.forward_peak);
      kept += each.kept;
      continue;
    }
    kept -= each.kept;
    const double here =
        have_gradients ? each.later_backward_peak : each.first_backward_peak;
    peaks.activations = std::max(peaks.activations, kept + here);
    peaks.gradients =
        std::max(peaks.gradients,
                 have_gradients ? each.later_gradients : each.first_gradients);
    have_gradients = true;
  }
  return peaks;
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

}  // namespace shardbook
