// Memory held by one device: parameters, what training adds to them, and what
// a forward keeps.

#include "chapters/common/run/kept.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "chapters/common/models/layer_list.h"
#include "chapters/common/models/resnet.h"
#include "chapters/common/run/report.h"

namespace shardbook {
namespace {

double parameters_of(const ModelConfig& c, double t) {
  const auto v = static_cast<double>(c.vocab_size);
  const auto h = static_cast<double>(c.n_embd);
  const DecoderNames names = decoder_names(c);
  if (c.type == "mlp") {
    return v * h + (h * 4 * h + 4 * h) + (4 * h * h + h) + (h * v + v);
  }
  const auto of_block = [t](const BlockTable& table) {
    double sum = 0;
    for (const BlockPart& part : table.parts()) sum += part.parameters(t);
    return sum;
  };
  double dense = 0, blocks = 0;
  for (std::int64_t i = 0; i < c.n_layer; ++i) {
    if (c.llama.has_experts_in(i)) blocks += of_block(block_table(c, i));
    if (!c.llama.has_experts_in(i)) ++dense;
  }
  const BlockTable table = block_table(c);
  blocks += dense * of_block(table);
  const double tables = names.head.empty() ? 1 : 2;
  const double positions =
      names.positions.empty() ? 0 : static_cast<double>(c.n_positions) * h;
  return tables * v * h / t + positions + blocks + table.norm_1.parameters(t);
}

// fc1, fc2 with a ReLU each: their inputs, and the inputs of the ReLUs. fc3:
// its input, the logits, the logarithms of the softmax's sums.
double kept_by_mlp_layer(const ModelConfig& config, int layer,
                         const KeptSizes& z) {
  const auto h = static_cast<double>(config.n_embd);
  const auto vocabulary = static_cast<double>(config.vocab_size);
  const double tokens = z.rows * z.tokens;
  if (layer == 3) return tokens * ((h + vocabulary) * z.element + z.stat);
  return tokens * 5 * h * z.element;
}

// Sides after a window of stride 2 with the same padding on both sides.
double halved(double side) { return std::ceil(side / 2); }

/// Of all images: sizes by channels-last pixels. Each norm keeps its input, which
/// is a convolution's output, and a mean and a deviation for each channel.
double kept_by_resnet_layer(const ModelConfig& config, int layer,
                            const KeptSizes& z) {
  const std::vector<ResNetBlockSize> blocks = resnet_blocks(config);
  const auto width = static_cast<double>(config.width);
  double side = halved(z.side);
  const auto norm = [&](double channels, double pixels) {
    return z.rows * channels * pixels * z.element + 2 * channels * 8;
  };
  // The image, channels last; the pool keeps the index of each largest pixel
  if (layer == 0) {
    const double pooled = halved(side) * halved(side);
    return z.rows * 3 * z.side * z.side * z.element + norm(width, side * side) +
           z.rows * width * pooled * 4;
  }
  side = halved(side);
  for (int i = 1; i < layer && i <= static_cast<int>(blocks.size()); ++i) {
    if (blocks[static_cast<std::size_t>(i - 1)].stride == 2)
      side = halved(side);
  }
  if (layer > static_cast<int>(blocks.size())) {
    // The last block's output (the mask of its ReLU); means, logits
    const auto features = static_cast<double>(blocks.back().out);
    const auto labels = static_cast<double>(config.num_labels);
    const double mask = z.recompute ? 0 : features * side * side;
    return z.rows * ((mask + features + labels) * z.element + z.stat);
  }
  const ResNetBlockSize& block = blocks[static_cast<std::size_t>(layer - 1)];
  const auto in = static_cast<double>(block.in);
  const auto wide = static_cast<double>(block.width);
  const auto out = static_cast<double>(block.out);
  const double before = side * side;
  const double after = block.stride == 2 ? halved(side) * halved(side) : before;
  const double input = z.rows * in * before * z.element;
  if (z.recompute) return input;
  double kept = input + norm(out, after);
  if (block.has_downsample()) kept += norm(out, after);
  if (!config.bottleneck) {
    return kept + norm(wide, after) + z.rows * wide * after * z.element;
  }
  return kept + norm(wide, before) + norm(wide, after) +
         z.rows * wide * (before + after) * z.element;
}

}  // namespace

KeptSizes kept_sizes(const ModelOptions& options, std::int64_t rows) {
  KeptSizes sizes;
  sizes.rows = static_cast<double>(rows);
  sizes.tokens = static_cast<double>(options.seq);
  sizes.side = static_cast<double>(options.image_size);
  sizes.element = static_cast<double>(dtype_bytes(options.dtype));
  sizes.stat = options.dtype == DType::kF64 ? 8 : 4;
  return sizes;
}

// The rows of the block's table; of GPT-2, in elements per token, where t ranks
// share heads and hidden units:
//
//   x                h     input of ln_1 (the residual stream)
//   ln_1             h     input of c_attn
//   q, k, v         3h/t   input of attention
//   attention        h/t   its output, input of c_proj
//   x + attention    h     input of ln_2
//   ln_2             h     input of c_fc
//   c_fc            4h/t   input of GELU
//   GELU            4h/t   input of c_proj
//              4h + 12h/t  and statistics: 2 + 2 of the norms, one per head
double kept_by_block(const ModelConfig& config, const KeptSizes& z) {
  const BlockTable block = block_table(config);
  const double tokens = z.rows * z.tokens;
  if (z.recompute) return tokens * block.norm_1.kept() * z.element;
  double elements = 0, statistics = 0;
  for (const BlockPart& part : block.parts()) {
    elements += part.kept(z.t);
    statistics += part.statistics(z.t);
  }
  return tokens * (elements * z.element + statistics * z.stat);
}

// Input and output of the last norm and its statistics, the logits, and the logarithms of
// the softmax's sums.
double kept_by_head(const ModelConfig& config, const KeptSizes& z) {
  const auto h = static_cast<double>(config.n_embd);
  const auto vocabulary = static_cast<double>(config.vocab_size);
  const double statistics = block_table(config).norm_1.statistics() + 1;
  return z.rows * z.tokens *
         ((2 * h + vocabulary / z.t) * z.element + statistics * z.stat);
}

double kept_by_layer(const ModelConfig& config, int layer, const KeptSizes& z) {
  if (config.is_image()) return kept_by_resnet_layer(config, layer, z);
  if (layer == 0) return 0;  // token ids are inputs
  if (config.type == "mlp") return kept_by_mlp_layer(config, layer, z);
  return layer <= config.n_layer ? kept_by_block(config, z)
                                 : kept_by_head(config, z);
}

// A block of GPT-2: inputs h, h/t, h, 4h/t and gradients 3h/t, h, 4h/t, h. The
// head: h and the logits' gradient.
double deferred_by_layer(const ModelConfig& config, int layer,
                         const KeptSizes& z) {
  const auto h = static_cast<double>(config.n_embd);
  const auto vocabulary = static_cast<double>(config.vocab_size);
  const double tokens = z.rows * z.tokens;
  if (layer == 0 || config.is_image()) return 0;
  if (config.type == "mlp" && layer < 3) return tokens * 5 * h * z.element;
  if (config.type == "mlp" || layer > config.n_layer)
    return tokens * (h + vocabulary / z.t) * z.element;
  double elements = 0;
  for (const BlockPart& part : block_table(config).parts()) {
    elements += part.deferred(z.t);
  }
  return tokens * elements * z.element;
}

double kept_by_model(const ModelConfig& config, const KeptSizes& z) {
  if (config.llama.num_experts > 0) return kNoClaim;
  const int layers = layers_of(config)->size();
  double sum = z.stat;  // the loss
  for (int layer = 0; layer < layers; ++layer) {
    sum += kept_by_layer(config, layer, z);
  }
  return sum;
}

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
