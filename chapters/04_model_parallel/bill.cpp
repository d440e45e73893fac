#include "chapters/04_model_parallel/bill.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::model_parallel {
namespace {

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const Tensor& tensor : tensors) {
    bytes += static_cast<double>(tensor.bytes());
  }
  return bytes;
}

/// The most bytes of gradients that one operation of backward returns at once:
/// those of a linear layer's weight and bias, or of a batch norm's two.
double largest_gradients_of(Stage& part) {
  double bytes = 0;
  for (const NamedModule& each : part.named_modules()) {
    if (auto* linear = dynamic_cast<Linear*>(each.module)) {
      bytes = std::max(bytes, bytes_of(linear->parameters()));
    } else if (auto* norm = dynamic_cast<BatchNorm*>(each.module)) {
      bytes = std::max(bytes, bytes_of(norm->parameters()));
    }
  }
  for (const Tensor& weight : part.parameters()) {
    bytes = std::max(bytes, static_cast<double>(weight.bytes()));
  }
  return bytes;
}

double elements_of(const Tensors& tensors) {
  double count = 0;
  for (const Tensor& tensor : tensors) {
    count += static_cast<double>(tensor.numel());
  }
  return count;
}

double label_bytes(const Options& options) {
  return 8.0 * static_cast<double>(options.batch * options.seq);
}

double input_bytes(const Options& options, const ModelConfig& config) {
  const auto rows = static_cast<double>(options.batch);
  if (!config.is_image()) return 8.0 * rows * static_cast<double>(options.seq);
  const auto side = static_cast<double>(options.image_size);
  return rows * 3 * side * side *
         static_cast<double>(dtype_bytes(options.dtype));
}

}  // namespace

double boundary_numel(const Options& options, const LayerList& layers,
                      int cut) {
  const LayerInput crossing =
      trace_shapes(layers, {input_on_shapes(options, 1)},
                   options.dtype)[static_cast<std::size_t>(cut)];
  double numel = 0;
  for (const ValueSpec& value : crossing.values) {
    numel += static_cast<double>(shape_numel(value.shape));
  }
  return numel;
}

std::vector<double> step_traffic(const Options& options,
                                 const Settings& settings, Trainer& trainer) {
  if (settings.num_devices() == 1) return {0};
  const double boundary =
      static_cast<double>(options.batch) *
      boundary_numel(options, trainer.layers(), trainer.cut()) *
      static_cast<double>(dtype_bytes(options.dtype));
  return {boundary + label_bytes(options), boundary};
}

std::vector<MemoryBill> memory_bills(const Options& options,
                                     const Settings& settings,
                                     Trainer& trainer) {
  const int n = settings.num_devices();
  const double states = optimizer_states(options);
  const bool in_splits = rows_of_split(options, settings) < options.batch;
  std::vector<MemoryBill> bills(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) {
    MemoryBill& bill = bills[static_cast<std::size_t>(i)];
    const Tensors weights = trainer.part(i).parameters();
    bill[MemoryKind::kParameter] =
        bytes_of(weights) + bytes_of(trainer.part(i).buffers());
    bill[MemoryKind::kGradient] = bill[MemoryKind::kOptimizerState] = 0;
    bill[MemoryKind::kCommunication] = bill[MemoryKind::kInput] = 0;
    if (options.steps == 0) continue;
    // With splits, the new gradients of a layer exist beside the sums.
    bill[MemoryKind::kGradient] =
        bytes_of(weights) +
        (in_splits ? largest_gradients_of(trainer.part(i)) : 0);
    bill[MemoryKind::kOptimizerState] =
        states * elements_of(weights) *
        (options.dtype == DType::kF64 ? 8.0 : 4.0);
    bill[MemoryKind::kInput] = label_bytes(options);
    if (i == 0) {
      bill[MemoryKind::kInput] += input_bytes(options, trainer.config());
      bill[MemoryKind::kCommunication] =
          n == 1 ? 0 : step_traffic(options, settings, trainer)[1];
    }
  }
  return bills;
}

}  // namespace shardbook::model_parallel
