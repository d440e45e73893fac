// Memory held by one device: parameters and what training adds to them.

#include <algorithm>

#include "chapters/common/models/resnet.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/report.h"

namespace shardbook {
namespace {

double parameters_of(const ModelConfig& c, double t) {
  const auto v = static_cast<double>(c.vocab_size);
  const auto h = static_cast<double>(c.n_embd);
  if (c.type == "mlp") {
    return v * h + (h * 4 * h + 4 * h) + (4 * h * h + h) + (h * v + v);
  }
  // Per block: c_attn, attention's c_proj, c_fc, c_proj, two norms. Weights cut
  // by rows have whole biases.
  const double block = (3 * h * h + 3 * h) / t + (h * h / t + h) +
                       (4 * h * h + 4 * h) / t + (4 * h * h / t + h) + 4 * h;
  return v * h / t + static_cast<double>(c.n_positions) * h +
         static_cast<double>(c.n_layer) * block + 2 * h;
}

}  // namespace

double optimizer_states(const TrainingOptions& options) {
  if (options.optimizer != "sgd") return 2;
  return options.optimizer_options.momentum > 0 ? 1 : 0;
}

MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              const std::vector<MicroBatch>& pieces,
                              bool recompute, int tensor_ranks) {
  std::int64_t rows = 0;
  for (const MicroBatch& piece : pieces) rows = std::max(rows, piece.rows);
  KeptSizes sizes = kept_sizes(options, rows);
  sizes.recompute = recompute;
  sizes.t = tensor_ranks;
  double trained = 0, statistics = 0;
  if (config.is_image()) {
    const ResNetSize size = resnet_size(config);
    trained = size.trained, statistics = size.statistics;
  } else {
    trained = parameters_of(config, sizes.t);
  }
  MemoryBill bill;
  bill[MemoryKind::kParameter] = (trained + statistics) * sizes.element;
  const bool trains = options.steps > 0;
  bill[MemoryKind::kGradient] = trains ? trained * sizes.element : 0;
  bill[MemoryKind::kOptimizerState] =
      trains ? optimizer_states(options) * trained * sizes.stat : 0;
  bill[MemoryKind::kActivation] = trains ? kept_by_model(config, sizes) : 0;
  return bill;
}

MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              std::int64_t rows, bool recompute) {
  return single_device_bill(options, config, {MicroBatch{BatchSlice{}, rows}},
                            recompute);
}

}  // namespace shardbook
