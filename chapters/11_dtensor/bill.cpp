// The bill of a GPT on dp x tp ranks: the formulas of the page.

#include <algorithm>

#include "chapters/11_dtensor/trainer.h"

namespace shardbook::dtensor {

namespace {

// Sizes of one micro-batch on one rank. d, t, tokens and layers are numbers, all
// others are bytes.
struct ActivationSizes {
  double d = 1, t = 1;
  bool is_fsdp = false, has_dropout = false;
  double tokens = 0, layers = 0;
  double stat = 0;            // one statistic
  double x = 0;               // tokens by h
  double logits = 0;          // tokens by V
  double in_blocks = 0;       // kept by all blocks
  double gathered = 0;        // parameters that stay for backward
  double table = 0;           // wte
  double positions = 0;       // wpe, ...
  double used_positions = 0;  // ... and those of a sequence
  double matrix = 0;          // this rank's part of c_fc, and of c_proj
  double bias = 0;            // h elements
};

// The logits, their gradient, ln_f's input, output and statistics, and those of
// the loss.
double at_loss(const ActivationSizes& z) {
  return z.in_blocks + z.gathered + 2 * z.x + 2 * z.logits +
         3 * z.tokens * z.stat;
}

// One rank on dp. Gradients of weights are booked as such, except that later
// micro-batches hold new ones beside the accumulated ones: the head's until the
// embedding's joins it, and that of c_proj for a moment.
double activations_alone(const ActivationSizes& z, bool is_later) {
  const double head = is_later ? z.table : 0;
  const double c_proj = is_later ? z.matrix : 0;
  // Beside the gradients of the logits and of ln_f's output
  const double at_head =
      z.in_blocks + 3 * z.x + z.logits + 2 * z.tokens * z.stat + head;
  // dy and GELU's two gradients, beside its input but not its output
  const double at_gelu = z.in_blocks +
                         (1 + (z.has_dropout ? 1 : 0) + 4 / z.t) * z.x + head +
                         c_proj;
  // The embeddings: wpe's used rows, then among zeros; wte's two gradients
  const double at_end =
      is_later ? z.x + head + std::max(z.used_positions + z.positions, head)
               : 0;
  // The loss, and the gradient of the mean
  return std::max({at_loss(z), at_head, at_gelu, at_end}) + 2 * z.stat;
}

// Several ranks on dp. The gradient of each weight is there twice for a moment:
// as this rank's term, and as its sum over dp, of which FSDP has one part.
// FSDP's gathered weight leaves before that, with the product that used it.
double activations_of_replicas(const ActivationSizes& z) {
  const double sum = z.is_fsdp ? 1 / z.d : 1;
  const double lent = z.is_fsdp ? 1 : 0;
  const double of_loss = 3 * z.stat;  // with the gradient of the global mean
  const double scalars = 2 * z.stat;
  const double tail =
      z.in_blocks + z.gathered + 2 * z.x + 2 * z.tokens * z.stat + scalars;
  const double at_head = tail + z.x + z.logits + z.table;
  const double at_head_sum = tail + (1 + sum - lent) * z.table;

  // The last block, beside the gradient of its output and the head's sum, which
  // waits for the embedding's
  const double last = z.in_blocks + z.x + sum * z.table + z.gathered -
                      lent * (z.table + 2 * z.bias) + scalars;
  const double at_c_proj =
      last + (z.has_dropout ? z.x : 0) + z.bias + 4 * z.x / z.t + z.matrix;
  const double at_c_proj_sum = last + (1 + sum - lent) * z.matrix;
  // The embeddings: of the blocks only FSDP's biases of c_proj are left
  const double first =
      z.x + sum * z.table + lent * (z.table + 2 * z.layers * z.bias) + scalars;
  const double at_positions =
      first + z.positions + std::max(z.used_positions, sum * z.positions);
  const double at_table_sum = first - z.x + (1 + sum - lent) * z.table;
  return std::max({at_loss(z) + of_loss, at_head, at_head_sum, at_c_proj,
                   at_c_proj_sum, at_positions, at_table_sum});
}

}  // namespace

double Trainer::parameters_of_tp() const {
  const auto v = static_cast<double>(config().vocab_size);
  const auto h = static_cast<double>(config().n_embd);
  // Cut by tp: c_attn and c_fc with their biases, both c_proj without
  const double cut = 3 * h * h + 3 * h + 4 * h * h + 4 * h + h * h + 4 * h * h;
  const double whole = 2 * h + 4 * h;  // biases of c_proj, two norms
  return v * h + static_cast<double>(config().n_positions) * h + 2 * h +
         static_cast<double>(config().n_layer) * (cut / t_ + whole);
}

double Trainer::predicted_bytes() const {
  const auto element = static_cast<double>(dtype_bytes(options_.dtype));
  const auto h = static_cast<double>(config().n_embd);
  const auto v = static_cast<double>(config().vocab_size);
  const auto m = static_cast<double>(micro_batches_);
  const double tokens =
      static_cast<double>(options_.batch * options_.seq) / (d_ * m);
  // tp: four all-reduces per layer
  const double tp = 4 * static_cast<double>(config().n_layer) * 2 * (t_ - 1) /
                    t_ * tokens * h;
  // dp: every use of a parameter, of which wte has two. R: an all-reduce; S(0):
  // an all-gather and a reduce-scatter.
  const double dp = 2 * (d_ - 1) / d_ * (parameters_of_tp() + v * h);
  const double stat = options_.dtype == DType::kF64 ? 8 : 4;
  // The sum of losses, and the count of targets
  const double loss = 2 * 2 * (d_ - 1) / d_ * stat;
  return static_cast<double>(options_.steps) *
         (m * ((tp + dp) * element + loss) + predicted_norm_bytes());
}

MemoryBill Trainer::bill() const {
  const bool is_fsdp = how_.data_parallel == "fsdp";
  const auto element = static_cast<double>(dtype_bytes(options_.dtype));
  const double stat = options_.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(config().n_embd);
  const auto v = static_cast<double>(config().vocab_size);
  const auto layers = static_cast<double>(config().n_layer);
  const double parameters = parameters_of_tp() / (is_fsdp ? d_ : 1);

  MemoryBill bill;
  bill[MemoryKind::kParameter] = parameters * element;
  for (const MemoryKind kind :
       {MemoryKind::kGradient, MemoryKind::kOptimizerState,
        MemoryKind::kActivation, MemoryKind::kInput,
        MemoryKind::kCommunication}) {
    bill[kind] = 0;
  }
  if (options_.steps == 0) return bill;
  bill[MemoryKind::kOptimizerState] =
      optimizer_states(options_) * parameters * stat;
  const auto rows = static_cast<double>(options_.batch / micro_batches_);
  const auto s = static_cast<double>(options_.seq);
  bill[MemoryKind::kInput] = rows * s * 2 * 8;
  bill[MemoryKind::kCommunication] = 8;
  // One rank on dp: the tied table has two gradients until they are added.
  // Several: both come summed over dp, and are added before they are booked
  const bool is_alone = d_ == 1;
  bill[MemoryKind::kGradient] = (parameters + (is_alone ? v * h : 0)) * element;
  ActivationSizes z;
  z.d = d_, z.t = t_, z.is_fsdp = is_fsdp && !is_alone;
  z.stat = stat;
  z.tokens = rows / d_ * s;
  z.x = z.tokens * h * element;
  z.logits = z.tokens * v * element;
  z.table = v * h * element;
  z.positions = static_cast<double>(config().n_positions) * h * element;
  z.used_positions = s * h * element;
  z.matrix = 4 * h * h / t_ * element;
  z.bias = h * element;
  z.layers = layers;
  // Of a token, a block keeps x, two norms' outputs and x + attention whole,
  // and q, k, v, attention, c_fc and GELU by parts
  const auto heads = static_cast<double>(config().n_head);
  z.in_blocks =
      layers * ((4 + 12 / t_) * z.x + z.tokens * (4 + heads / t_) * stat);
  // What FSDP has gathered stays for backward: wte twice, and not wpe
  z.gathered =
      z.is_fsdp ? parameters_of_tp() * element + z.table - z.positions : 0;
  z.has_dropout = options_.dropout > 0;
  bill[MemoryKind::kActivation] =
      is_alone ? activations_alone(z, /*is_later=*/micro_batches_ > 1)
               : activations_of_replicas(z);
  return bill;
}

}  // namespace shardbook::dtensor
