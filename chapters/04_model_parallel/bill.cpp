#include "chapters/04_model_parallel/bill.h"

#include <algorithm>
#include <cmath>

#include "chapters/01_data_parallel/bill.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/textbook.h"
#include "core/check.h"

namespace shardbook::model_parallel {
namespace {

using data_parallel::bytes_of;

double label_bytes(const Options& options) {
  return 8.0 * static_cast<double>(options.batch * options.seq);
}

/// How often a sample multiplies by this weight: for every token, or every
/// output pixel ("layer3.0.conv2.weight"). Stages halve the image.
double uses_per_sample(const std::string& name, const Options& options,
                       const ModelConfig& config) {
  const auto has = [&](const char* part) {
    return name.find(part) != std::string::npos;
  };
  if (!config.is_image()) {
    return has("wte") ? 0 : static_cast<double>(options.seq);
  }
  if (has("fc")) return 1;
  const auto half = [](double side) { return std::ceil(side / 2); };
  double side = half(static_cast<double>(options.image_size));
  if (!has("layer")) return side * side;  // the stem's, before its pooling
  side = half(side);
  int halvings = name[5] - '1';
  // A bottleneck's first convolution still sees the larger image
  if (config.bottleneck && halvings > 0 && has(".0.conv1")) halvings -= 1;
  for (int i = 0; i < halvings; ++i) side = half(side);
  return side * side;
}

/// Seconds of one half for one split.
struct HalfTime {
  double forward = 0, backward = 0;
};
HalfTime half_time(const Options& options, const ModelConfig& config,
                   Module& half, double rows) {
  HalfTime time;
  for (const NamedTensor& each : half.named_parameters()) {
    if (each.tensor.ndim() < 2) continue;
    const double forward = 2 * static_cast<double>(each.tensor.numel()) * rows *
                           uses_per_sample(each.name, options, config) /
                           textbook::kRate;
    time.forward += forward;
    // Images need no gradient
    time.backward += each.name == "conv1.weight" ? forward : 2 * forward;
  }
  return time;
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
                                 const Settings& settings,
                                 ModelParallelStrategy& strategy) {
  if (settings.num_devices() == 1) return {0};
  const double boundary =
      static_cast<double>(options.batch) *
      boundary_numel(options, strategy.layers(), strategy.cut()) *
      static_cast<double>(dtype_bytes(options.dtype));
  return {boundary + label_bytes(options), boundary};
}

std::vector<MemoryBill> memory_bills(const Options& options,
                                     const Settings& settings,
                                     ModelParallelStrategy& strategy) {
  const int n = settings.num_devices();
  const double states = optimizer_states(options);
  std::vector<MemoryBill> bills(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) {
    MemoryBill& bill = bills[static_cast<std::size_t>(i)];
    Stage& part = strategy.part(i);
    const double weight_bytes = bytes_of(part.parameters());
    bill.bytes.fill(0);
    bill[MemoryKind::kParameter] = weight_bytes + bytes_of(part.buffers());
    if (options.steps == 0) continue;
    bill[MemoryKind::kGradient] = weight_bytes;
    bill[MemoryKind::kOptimizerState] =
        states * static_cast<double>(part.num_parameters()) *
        (options.dtype == DType::kF64 ? 8.0 : 4.0);
    const int size = strategy.layers().size();
    const int begin = i == 0 ? 0 : strategy.cut();
    const int end = i + 1 == n ? size : strategy.cut();
    double& kept = bill[MemoryKind::kActivation];
    for (const auto& [first, last] :
         fixed_splits(options.batch, rows_of_split(options, settings))) {
      const KeptSizes sizes = kept_sizes(options, last - first);
      for (int layer = begin; layer < end; ++layer) {
        kept += kept_by_layer(strategy.config(), layer, sizes);
      }
    }
    // The last block's output, the mask of its ReLU, is kept next to its copy
    if (i + 1 < n && strategy.config().is_image() && strategy.cut() > 1) {
      kept += step_traffic(options, settings, strategy)[1];
    }
    if (i + 1 < n) continue;
    // A head alone only averages the copy, and does not keep it
    if (n > 1 && strategy.config().is_image() && strategy.cut() == size - 1) {
      kept -= step_traffic(options, settings, strategy)[1];
    }
    // The mean square keeps no logarithms of sums, and has the dtype of the
    // outputs
    const double stat = options.dtype == DType::kF64 ? 8 : 4;
    const bool is_mse = settings.loss == "mse";
    if (is_mse) kept -= stat * static_cast<double>(options.batch);
    kept += is_mse ? static_cast<double>(dtype_bytes(options.dtype)) : stat;
  }
  return bills;
}

double step_s(const Options& options, const Settings& settings,
              ModelParallelStrategy& strategy) {
  const ModelConfig& config = strategy.config();
  const std::int64_t rows = rows_of_split(options, settings);
  if (!textbook::is_chosen(options) || config.has_blocks() ||
      options.batch % rows != 0) {
    return kNotPredicted;
  }
  const auto splits = static_cast<double>(options.batch / rows);
  const auto time_of = [&](int device) {
    return half_time(options, config, strategy.part(device),
                     static_cast<double>(rows));
  };
  const HalfTime first = time_of(0);
  if (settings.num_devices() == 1) {
    return splits * (first.forward + first.backward);
  }
  const HalfTime second = time_of(1);
  const double boundary =
      static_cast<double>(rows) *
      boundary_numel(options, strategy.layers(), strategy.cut()) *
      static_cast<double>(dtype_bytes(options.dtype));
  const double copy = textbook::message(boundary);
  // Forward: both devices stop for a copy, then work on neighbouring splits
  const double forward =
      first.forward + copy +
      (splits - 1) * (std::max(first.forward, second.forward) + copy) +
      second.forward;
  // Backward: gradients arrive while the first device works on the split before
  const double backward =
      second.backward + copy +
      (splits - 1) * std::max(first.backward, second.backward + copy) +
      first.backward;
  return forward + textbook::message(label_bytes(options)) + backward;
}

}  // namespace shardbook::model_parallel
