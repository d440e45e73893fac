#include "chapters/10_tensor_parallel_3d/trainer.h"

#include <algorithm>
#include <cmath>

#include "chapters/10_tensor_parallel_3d/layers.h"
#include "core/check.h"

namespace shardbook::cube {

// --- The bill --------------------------------------------------------------------

namespace {

/// all_reduce of n elements over p ranks.
double reduced(double p, double n) { return 2 * (p - 1) / p * n; }

}  // namespace

double linear_elements(double l, double m, double k, double n,
                       bool keep_gathered) {
  const double each = (l - 1) / (l * l * l);
  const double operands = m * k + k * n;
  return each * (2 * (operands + m * n) + (keep_gathered ? 0 : operands));
}

namespace {

/// What one micro-batch sends.
double micro_batch_bytes(const Sizes& s) {
  const double l = s.l, t = s.tokens, h = s.h;
  const auto linear = [&](double k, double n) {
    return linear_elements(l, t, k, n, s.keep_gathered);
  };
  // A vector of n: its gradient is added up over l^2 ranks
  const auto vector = [&](double n) { return reduced(l * l, n / l); };
  const double norms = 2 * s.layers + 1;

  double elements = s.layers * (linear(h, 3 * h) + linear(h, h) +
                                linear(h, 4 * h) + linear(4 * h, h));
  elements += s.layers * (vector(3 * h) + 2 * vector(h) + vector(4 * h));
  elements += norms * 2 * vector(h);
  // The table over WEIGHT and its tokens over INPUT, forward and backward
  elements += 2 * (l - 1) / (l * l * l) * (s.vocabulary * h + t * h);
  elements += vector(s.seq * h);
  elements += linear(h, s.vocabulary);

  const double rows = t / (l * l);
  double stats = norms * 2 * reduced(l, 2 * rows);
  stats += 3 * reduced(l, rows) + 2 * reduced(l, 2);
  if (s.recompute) {
    // The forward of each block again: columns that are read and written, weights
    elements += s.layers * (l - 1) / (l * l * l) * (16 * t * h + 12 * h * h);
    stats += s.layers * 2 * reduced(l, 2 * rows);
  }
  return elements * s.element + stats * s.stat;
}

}  // namespace

double step_bytes(const Sizes& s) {
  return s.l == 1 ? 0 : s.micro_batches * micro_batch_bytes(s);
}

double parameters_per_rank(const Sizes& s) {
  const double matrices = s.layers * 12 * s.h * s.h + s.vocabulary * s.h;
  const double vectors =
      s.layers * (9 * s.h + 4 * s.h) + 2 * s.h + s.positions * s.h;
  return matrices / (s.l * s.l * s.l) + vectors / s.l;
}

double activation_bytes(const Sizes& s, bool is_later) {
  const double e = s.element, stat = s.stat, l = s.l;
  const double n = s.tokens / (l * l);             // this rank's tokens, ...
  const double w = s.h / l, v = s.vocabulary / l;  // ... in its columns
  const double x = n * w * e, logits = n * v * e;
  const double square = w * w * e;  // a weight [h, h], gathered
  const double table = v * w * e;   // gathered
  // A block keeps what it keeps on one device (chapters/common/run/memory.cpp).
  // Its four products read 7h per token and 12h^2 weights
  const double gathered = 7 * l * x + 12 * square;
  const double block =
      16 * x + n * (4 + s.heads / l) * stat + (s.keep_gathered ? gathered : 0);
  // The embedding keeps its gathered table to the end
  const double kept = s.layers * (s.recompute ? x : block) + table + 2 * stat;
  // Of the block whose backward runs, its input is kept anyway
  const double again = s.recompute ? block - x : 0;
  // Later micro-batches hold new gradients beside the accumulated ones
  const double head = is_later ? table / l : 0;

  // Backward of a product is widest when dW has been computed: beside both
  // gathered operands there are dY, dY gathered, dX after its sum and, until its
  // sum has left, before. Then a later micro-batch holds its part of dW
  const double regathered = s.keep_gathered ? 0 : 4 * l * x + 4 * square;
  const double at_mlp = kept + again + (s.has_dropout ? 2 : 1) * x + l * x +
                        regathered +
                        std::max(4 * l * x, is_later ? 4 * square / l : 0) +
                        4 * x + 4 * square + head;
  const double at_head = kept + 2 * x + 2 * n * stat + l * x + table +
                         (1 + l) * logits + std::max(l * x, head) + x + table;
  // The backward of a norm is that of the 2D chapter
  const double norm = 2 * x + n * w * (e < stat ? 7 : 6) * stat + 2 * n * stat;
  const double at_norm = kept + norm + 2 * n * stat + head;
  // The same of ln_2, when the MLP behind it is done
  const double of_mlp = 9 * x + (s.keep_gathered ? 5 * l * x + 8 * square : 0);
  const double at_ln_2 = kept + again - of_mlp + norm + head;
  return std::max({at_mlp, at_head, at_norm, at_ln_2});
}

// --- The trainer -----------------------------------------------------------------

namespace {

Options checked(const Options& options, const Cube& cube,
                const Passes& passes) {
  const ModelConfig config = model_config(options);
  if (config.type != "gpt2") return options;  // ShardedTrainer refuses it
  const int l = cube.l();
  check_divides("--batch", options.batch, passes.micro_batches * l * l,
                passes.micro_batches == 1
                    ? "the batch is cut into"
                    : "micro-batches and ranks cut it into");
  const std::string model = "--model " + options.model;
  check_divides(model + ": n_head", config.n_head, l, "heads are cut into");
  check_divides(model + ": n_embd", config.n_embd, l * l,
                "rows of weights are cut into");
  return options;
}

ShardedModel sharded_model(const Options& options, const Cube& cube) {
  const std::int64_t vocabulary = model_config(options).vocab_size;
  ShardedModel model;
  model.layers = layers(cube, vocabulary);
  const int l = cube.l();
  model.layout = [l](const std::string& name, int rank) {
    return layout(name, place_of(rank, l));
  };
  model.padded_vocabulary = padded_vocabulary(vocabulary, l * l);
  return model;
}

}  // namespace

Trainer::Trainer(const Options& options, const Cube& cube, ProcessGroup& group,
                 const Passes& passes)
    : ShardedTrainer(checked(options, cube, passes),
                     sharded_model(options, cube), group, passes.micro_batches,
                     passes.recompute),
      cube_(cube),
      passes_(passes) {}

Sizes Trainer::sizes() const {
  Sizes s;
  s.l = cube_.l();
  s.micro_batches = static_cast<double>(passes_.micro_batches);
  s.recompute = passes_.recompute;
  s.tokens =
      static_cast<double>(options_.batch * options_.seq) / s.micro_batches;
  s.seq = static_cast<double>(options_.seq);
  s.h = static_cast<double>(config().n_embd);
  s.heads = static_cast<double>(config().n_head);
  s.layers = static_cast<double>(config().n_layer);
  s.positions = static_cast<double>(config().n_positions);
  s.vocabulary = static_cast<double>(
      padded_vocabulary(config().vocab_size, cube_.l() * cube_.l()));
  s.element = static_cast<double>(dtype_bytes(options_.dtype));
  s.stat = options_.dtype == DType::kF64 ? 8 : 4;
  s.keep_gathered = cube_.keep_gathered;
  s.has_dropout = options_.dropout > 0;
  return s;
}

double Trainer::predicted_bytes() const {
  return static_cast<double>(options_.steps) *
         (step_bytes(sizes()) + predicted_norm_bytes());
}

MemoryBill Trainer::bill() const {
  MemoryBill bill = single_device_bill(
      options_, config(),
      strided_micro_batches(options_.batch, passes_.micro_batches),
      passes_.recompute);
  const Sizes s = sizes();
  const double whole = bill[MemoryKind::kParameter];
  const double part = parameters_per_rank(s) * s.element;
  bill[MemoryKind::kParameter] = part;
  if (options_.steps == 0) return bill;
  // At the end of backward the table has a gradient of the head and one of the
  // embedding. Before, that of the positions used lies beside that of all
  const double table = s.vocabulary * s.h / (s.l * s.l * s.l) * s.element;
  const double positions = s.l == 1 ? 0 : s.seq * s.h / s.l * s.element;
  bill[MemoryKind::kGradient] = part + std::max(table, positions);
  bill[MemoryKind::kOptimizerState] *= part / whole;
  // The norm of the gradient; sum, count and gradient of the loss
  bill[MemoryKind::kCommunication] =
      cube_.num_ranks() > 1 ? std::max(8.0, 3 * s.stat) : 8;
  if (cube_.num_ranks() > 1) {
    double& activations = bill[MemoryKind::kActivation];
    activations = activation_bytes(s, /*is_later=*/false);
    if (s.micro_batches > 1) {
      activations = std::max(activations, activation_bytes(s, true));
    }
  }
  return bill;
}

// --- The documents' MLP ------------------------------------------------------------

std::string describe_mlp(int l) {
  constexpr std::int64_t kRows = 16, kWidth = 256, kInner = 1024;
  const int parts = l * l;
  if (kRows % parts != 0 || kWidth % parts != 0) return "";
  const auto block = [=](std::int64_t rows, std::int64_t columns) {
    return shape_text({rows / parts, columns / l});
  };
  const double moved = linear_elements(l, kRows, kWidth, kInner) +
                       linear_elements(l, kRows, kInner, kWidth);
  return "An MLP of [16, 256], 256 -> 1024 -> 256: on each rank input " +
         block(kRows, kWidth) + ", weights " + block(kWidth, kInner) + " and " +
         block(kInner, kWidth) + ", outputs " + block(kRows, kInner) + " and " +
         block(kRows, kWidth) + "; " + std::to_string(std::llround(moved)) +
         " elements sent per rank, forward and backward\n";
}

std::string Trainer::remarks() { return describe_mlp(cube_.l()); }

}  // namespace shardbook::cube
