// The bill of a GPT on dp x tp ranks: the formulas of the page.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "chapters/11_dtensor/trainer.h"

namespace shardbook::dtensor {

namespace {

// `count` parameters that tp leaves `rows` rows of `width` elements.
struct Matrices {
  double rows, width, count;
};

std::vector<Matrices> parameters_of(const ModelConfig& config, double t) {
  const auto h = static_cast<double>(config.n_embd);
  const auto layers = static_cast<double>(config.n_layer);
  return {{static_cast<double>(config.vocab_size), h, 1},
          {static_cast<double>(config.n_positions), h, 1},
          {h, 1, 2 + 6 * layers},  // norms, and biases of both c_proj
          {h, 3 * h / t, layers},  // c_attn
          {3 * h / t, 1, layers},
          {h / t, h, layers},      // its c_proj
          {h, 4 * h / t, layers},  // c_fc
          {4 * h / t, 1, layers},
          {4 * h / t, h, layers}};  // its c_proj
}

// Elements of all parameters, of which `rows(n)` of n rows count.
double elements(const std::vector<Matrices>& parameters,
                const std::function<double(double n)>& rows) {
  double sum = 0;
  for (const Matrices& each : parameters) {
    sum += rows(each.rows) * each.width * each.count;
  }
  return sum;
}

// A parameter over dp, in bytes. FSDP keeps a part of the sum, and gathers parts
// of equal lengths; DDP keeps the sum, and gathers nothing.
struct Lent {
  double term = 0;      // this rank's term of the gradient
  double sum = 0;       // what the rank keeps of the sum over dp
  double gathered = 0;  // what a forward borrows
  /// While the term becomes the sum: what was borrowed has left.
  double both() const { return term + sum - gathered; }
};

// Sizes of one micro-batch on one rank. t, tokens and layers are numbers, all
// others are bytes.
struct ActivationSizes {
  double t = 1;
  bool has_dropout = false;
  double tokens = 0, layers = 0;
  double stat = 0;            // one statistic
  double x = 0;               // tokens by h
  double logits = 0;          // tokens by V
  double in_blocks = 0;       // kept by all blocks
  double gathered = 0;        // parameters that stay for backward
  Lent table;                 // wte
  Lent positions;             // wpe, ...
  double used_positions = 0;  // ... and those of a sequence
  Lent matrix;                // this rank's part of the MLP's c_proj
  Lent bias;                  // h elements
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
  const double head = is_later ? z.table.term : 0;
  const double c_proj = is_later ? z.matrix.term : 0;
  // Beside the gradients of the logits and of ln_f's output
  const double at_head =
      z.in_blocks + 3 * z.x + z.logits + 2 * z.tokens * z.stat + head;
  // dy and GELU's two gradients, beside its input but not its output
  const double at_gelu = z.in_blocks +
                         (1 + (z.has_dropout ? 1 : 0) + 4 / z.t) * z.x + head +
                         c_proj;
  // The embeddings: wpe's used rows, then among zeros; wte's two gradients
  const double at_end =
      is_later
          ? z.x + head + std::max(z.used_positions + z.positions.term, head)
          : 0;
  // The loss, and the gradient of the mean
  return std::max({at_loss(z), at_head, at_gelu, at_end}) + 2 * z.stat;
}

// Several ranks on dp. The gradient of each weight is there twice for a moment:
// as this rank's term, and as its sum over dp, of which FSDP has one part.
// FSDP's gathered weight leaves before that, with the product that used it.
double activations_of_replicas(const ActivationSizes& z) {
  const double of_loss = 3 * z.stat;  // with the gradient of the global mean
  const double scalars = 2 * z.stat;
  const double tail =
      z.in_blocks + z.gathered + 2 * z.x + 2 * z.tokens * z.stat + scalars;
  const double at_head = tail + z.x + z.logits + z.table.term;
  const double at_head_sum = tail + z.table.both();

  // The last block, beside the gradient of its output and the head's sum, which
  // waits for the embedding's
  const double last = z.in_blocks + z.x + z.table.sum + z.gathered -
                      z.table.gathered - 2 * z.bias.gathered + scalars;
  const double at_c_proj = last + (z.has_dropout ? z.x : 0) + z.bias.term +
                           4 * z.x / z.t + z.matrix.term;
  const double at_c_proj_sum = last + z.matrix.both();
  // The embeddings: of the blocks only FSDP's biases of c_proj are left
  const double first = z.x + z.table.sum + z.table.gathered +
                       2 * z.layers * z.bias.gathered + scalars;
  const double at_positions =
      first + z.positions.term + std::max(z.used_positions, z.positions.sum);
  const double at_table_sum = first - z.x + z.table.both();
  return std::max({at_loss(z) + of_loss, at_head, at_head_sum, at_c_proj,
                   at_c_proj_sum, at_positions, at_table_sum});
}

}  // namespace

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
  // an all-gather and a reduce-scatter of parts of ceil(n / d) rows.
  const auto travels = [this](double n) {
    return how_.data_parallel == "fsdp" ? d_ * std::ceil(n / d_) : n;
  };
  const double dp =
      2 * (d_ - 1) / d_ *
      (elements(parameters_of(config(), t_), travels) + travels(v) * h);
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
  // dp's parts of n rows: the longest, this rank's, and all with their padding
  const double d = is_fsdp ? d_ : 1;
  const double index = is_fsdp ? devices_.coordinate("dp") : 0;
  const auto part = [=](double n) { return std::ceil(n / d); };
  const auto own = [=](double n) {
    return std::clamp(n - index * part(n), 0., part(n));
  };
  const auto padded = [=](double n) { return d * part(n); };
  const auto all = parameters_of(config(), t_);
  const double parameters = elements(all, own);

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
  // The squared norm; of uneven rows the padded copy, and the padding
  bill[MemoryKind::kCommunication] = 8;
  for (const auto& [n, width, count] : all) {
    if (padded(n) == n) continue;
    bill[MemoryKind::kCommunication] =
        std::max(bill[MemoryKind::kCommunication],
                 (2 * padded(n) - n) * width * element);
  }
  // One rank on dp: the tied table has two gradients until they are added.
  // Several: both come summed over dp, and are added before they are booked
  const bool is_alone = d_ == 1;
  bill[MemoryKind::kGradient] =
      (elements(all, part) + (is_alone ? v * h : 0)) * element;
  const auto lent = [&](double n, double width) {
    return Lent{n * width * element, part(n) * width * element,
                is_fsdp ? padded(n) * width * element : 0};
  };
  ActivationSizes z;
  z.t = t_;
  z.stat = stat;
  z.tokens = rows / d_ * s;
  z.x = z.tokens * h * element;
  z.logits = z.tokens * v * element;
  z.table = lent(v, h);
  z.positions = lent(static_cast<double>(config().n_positions), h);
  z.used_positions = s * h * element;
  z.matrix = lent(4 * h / t_, h);
  z.bias = lent(h, 1);
  z.layers = layers;
  // Of a token, a block keeps x, two norms' outputs and x + attention whole,
  // and q, k, v, attention, c_fc and GELU by parts
  const auto heads = static_cast<double>(config().n_head);
  z.in_blocks =
      layers * ((4 + 12 / t_) * z.x + z.tokens * (4 + heads / t_) * stat);
  // What FSDP has gathered stays for backward: wte twice, and not wpe
  if (is_fsdp && !is_alone) {
    z.gathered = elements(all, padded) * element + z.table.gathered -
                 z.positions.gathered;
  }
  z.has_dropout = options_.dropout > 0;
  bill[MemoryKind::kActivation] =
      is_alone ? activations_alone(z, /*is_later=*/micro_batches_ > 1)
               : activations_of_replicas(z);
  return bill;
}

}  // namespace shardbook::dtensor
