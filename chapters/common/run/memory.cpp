// Peak memory of one device, derived by walking through a training step.

#include <algorithm>

#include "chapters/common/models/resnet.h"
#include "chapters/common/run/report.h"

namespace shardbook {
namespace {

struct Sizes {
  double tokens, h, heads, vocab, layers;
  double t = 1;    // ranks that share heads, hidden units and vocabulary
  double element;  // bytes of an element
  double stat;     // bytes of a statistic
  bool has_dropout;
};

// What the forward of one block keeps for its backward, in elements per token,
// where t ranks share heads and hidden units:
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
double block_bytes(const Sizes& s) {
  return s.tokens *
         ((4 + 12 / s.t) * s.h * s.element + (4 + s.heads / s.t) * s.stat);
}

// Gradients inside the last block at its widest point. At the GELU: dy, then the
// gradients of GELU's output and input, after c_proj's input has been dropped
// (before, GELU's input has no gradient yet): h + 4h/t + 4h/t - 4h/t. With more
// than 8 ranks at c_fc: dy, and the gradients of its output and input, after
// GELU's input has been dropped as well: h + 4h/t + h - 8h/t. Dropout behind
// c_proj has a gradient of its own beside dy.
double block_gradients(const Sizes& s) {
  const double widest = std::max(1 + 4 / s.t, 2 - 4 / s.t);
  return s.tokens * (widest + (s.has_dropout ? 1 : 0)) * s.h * s.element;
}

double gpt_activations(const Sizes& s, bool recompute, bool accumulates) {
  const double in_blocks = recompute ? s.layers * s.tokens * s.h * s.element
                                     : s.layers * block_bytes(s);
  // Behind the blocks: input and output of ln_f, its statistics, the logits,
  // and the logarithms of the softmax's sums.
  const double vocab = s.vocab / s.t;
  const double tail = s.tokens * (2 * s.h * s.element + 2 * s.stat +
                                  vocab * s.element + s.stat);
  // Scalars: the loss, and the gradient that backward starts from.
  const double scalars = 2 * s.stat;
  const double at_loss =
      in_blocks + tail + s.tokens * vocab * s.element + scalars;
  double at_last_block = in_blocks + block_gradients(s) + scalars;
  // With recomputation: the last block's activations once more, except its input,
  // which is kept. Its forward ends beside dy with the MLP's result and the
  // block's: 3h.
  const double again =
      recompute ? block_bytes(s) - s.tokens * s.h * s.element : 0;
  at_last_block += again;
  double at_end_of_forward =
      recompute ? in_blocks + again + s.tokens * 3 * s.h * s.element + scalars
                : 0;
  // Beside the gradients of the head's output and input.
  double at_head = in_blocks +
                   s.tokens * ((3 * s.h + vocab) * s.element + 2 * s.stat) +
                   scalars;
  if (!accumulates) {
    return std::max({at_loss, at_last_block, at_end_of_forward, at_head});
  }
  // Later micro-batches hold new gradients beside the accumulated ones: that
  // of the head until the embedding's joins it, those of c_proj for a moment
  // (where ranks share it, that of its bias comes before).
  const double head = vocab * s.h * s.element;
  at_last_block += head + (4 * s.h / s.t + (s.t > 1 ? 0 : 1)) * s.h * s.element;
  // With few tokens and a large vocabulary, the peak is at the head, beside its
  // own gradient, or at the very end, when the embedding's gradient meets the
  // head's.
  at_head += head;
  at_end_of_forward += head;
  const double at_end = s.tokens * s.h * s.element + 2 * head + scalars;
  return std::max({at_loss, at_last_block, at_end_of_forward, at_head, at_end});
}

double mlp_activations(const Sizes& s, bool accumulates) {
  const double scalars = 2 * s.stat;
  // Embedding h, fc1 4h, ReLU 4h, fc2 h, ReLU h, logits, their gradient.
  const double at_loss =
      s.tokens * (11 * s.h * s.element + 2 * s.vocab * s.element + s.stat) +
      scalars;
  // At the wide ReLU: embedding, its input, and the gradients of both sides.
  const double at_relu = s.tokens * 13 * s.h * s.element + scalars;
  if (accumulates) {
    // New gradients stand beside the accumulated ones: those of the head, with
    // the gradients of its output and input, or the embedding's at the end.
    const double at_head =
        (s.tokens * (12 * s.h + s.vocab) + (s.h + 1) * s.vocab) * s.element +
        scalars;
    const double at_end = (s.tokens + s.vocab) * s.h * s.element + scalars;
    return std::max({at_loss, at_relu, at_head, at_end});
  }
  return std::max(at_loss, at_relu);
}

double parameters_of(const ModelConfig& c, double t) {
  const auto v = static_cast<double>(c.vocab_size);
  const auto h = static_cast<double>(c.n_embd);
  if (c.type == "mlp") {
    return v * h + (h * 4 * h + 4 * h) + (4 * h * h + h) + (h * v + v);
  }
  // Per block: c_attn, attention's c_proj, c_fc, c_proj, two norms. What is cut
  // by rows has its bias whole.
  const double block = (3 * h * h + 3 * h) / t + (h * h / t + h) +
                       (4 * h * h + 4 * h) / t + (4 * h * h / t + h) + 4 * h;
  return v * h / t + static_cast<double>(c.n_positions) * h +
         static_cast<double>(c.n_layer) * block + 2 * h;
}

/// A bill before training: every kind is 0 except parameters and workspace.
MemoryBill empty_bill() {
  MemoryBill bill;
  for (const MemoryKind kind :
       {MemoryKind::kGradient, MemoryKind::kOptimizerState,
        MemoryKind::kActivation, MemoryKind::kInput,
        MemoryKind::kCommunication}) {
    bill[kind] = 0;
  }
  return bill;
}

/// Activations of a ResNet are left open, since their widest point depends on
/// the shape of every block: a run on shapes predicts them (worlds.h).
MemoryBill resnet_bill(const Options& options, const ModelConfig& config,
                       std::int64_t rows) {
  const ResNetSize size = resnet_size(config);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const double stat = options.dtype == DType::kF64 ? 8 : 4;
  const double image = 3.0 * static_cast<double>(options.image_size) *
                       static_cast<double>(options.image_size);
  MemoryBill bill = empty_bill();
  bill[MemoryKind::kParameter] = (size.trained + size.statistics) * element;
  if (options.steps == 0) return bill;
  bill[MemoryKind::kGradient] = size.trained * element;
  bill[MemoryKind::kOptimizerState] =
      optimizer_states(options) * size.trained * stat;
  bill[MemoryKind::kActivation] = -1;
  bill[MemoryKind::kInput] = static_cast<double>(rows) * (image * element + 8);
  return bill;
}

}  // namespace

double optimizer_states(const Options& options) {
  if (options.optimizer != "sgd") return 2;
  return options.optimizer_options.momentum > 0 ? 1 : 0;
}

MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              const std::vector<MicroBatch>& pieces,
                              bool recompute, int tensor_ranks) {
  std::int64_t rows = 0;
  for (const MicroBatch& piece : pieces) rows = std::max(rows, piece.rows);
  if (config.is_image()) return resnet_bill(options, config, rows);
  Sizes s;
  s.h = static_cast<double>(config.n_embd);
  s.heads = static_cast<double>(config.n_head);
  s.vocab = static_cast<double>(config.vocab_size);
  s.layers = static_cast<double>(config.n_layer);
  s.element = static_cast<double>(dtype_bytes(options.dtype));
  s.stat = options.dtype == DType::kF64 ? 8 : 4;
  s.has_dropout = options.dropout > 0;
  s.t = tensor_ranks;
  const bool is_gpt = config.type == "gpt2";

  const double parameters = parameters_of(config, s.t);
  MemoryBill bill = empty_bill();
  bill[MemoryKind::kParameter] = parameters * s.element;
  if (options.steps == 0) return bill;
  // The tied table receives one gradient from the head and one from the
  // embedding; both exist until they are added.
  bill[MemoryKind::kGradient] =
      (parameters + (is_gpt ? s.vocab * s.h / s.t : 0)) * s.element;
  bill[MemoryKind::kOptimizerState] =
      optimizer_states(options) * parameters * s.stat;
  // The first piece may be the largest, a later one needs more for each row
  double& activations = bill[MemoryKind::kActivation];
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    s.tokens = static_cast<double>(pieces[i].rows * options.seq);
    activations =
        std::max(activations, is_gpt ? gpt_activations(s, recompute, i > 0)
                                     : mlp_activations(s, i > 0));
  }
  bill[MemoryKind::kInput] = static_cast<double>(rows * options.seq) * 2 * 8;
  return bill;
}

MemoryBill single_device_bill(const Options& options, const ModelConfig& config,
                              std::int64_t rows, bool recompute,
                              bool accumulates) {
  const MicroBatch piece = {BatchSlice{}, rows};
  return single_device_bill(options, config,
                            std::vector<MicroBatch>(accumulates ? 2 : 1, piece),
                            recompute);
}

}  // namespace shardbook
