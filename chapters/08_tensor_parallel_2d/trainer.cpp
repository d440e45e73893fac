#include "chapters/08_tensor_parallel_2d/trainer.h"

#include <algorithm>
#include <cmath>

#include "chapters/08_tensor_parallel_2d/layers.h"
#include "core/check.h"

namespace shardbook::summa {

// --- The bill --------------------------------------------------------------------

namespace {

/// all_reduce of n elements over p ranks.
double reduced(double p, double n) { return 2 * (p - 1) / p * n; }

/// A vector of n: gathered over COL forward, scattered backward, and added over
/// the depth.
double vector_elements(double q, double d, double n) {
  return 2 * (q - 1) / q * n / q + reduced(d, n / (q * q));
}

}  // namespace

double linear_elements(double q, double d, double m, double k, double n) {
  return 3 * (q - 1) / (q * q) * (m * k / d + k * n) +
         reduced(d, k * n / (q * q));
}

namespace {

/// What one micro-batch sends.
double micro_batch_bytes(const Sizes& s) {
  const double q = s.q, d = s.d, t = s.tokens, h = s.h;
  const double rows = t / (d * q);  // tokens of this rank
  const double norms = 2 * s.layers + 1;

  double elements =
      s.layers *
      (linear_elements(q, d, t, h, 3 * h) + linear_elements(q, d, t, h, h) +
       linear_elements(q, d, t, h, 4 * h) + linear_elements(q, d, t, 4 * h, h));
  elements +=
      s.layers * (vector_elements(q, d, 3 * h) + 2 * vector_elements(q, d, h) +
                  vector_elements(q, d, 4 * h));
  elements += norms * 2 * vector_elements(q, d, h);
  // Tokens: reduce_scatter forward, all_gather backward; positions
  elements += 2 * (q - 1) / q * t * h / (d * q);
  elements += reduced(d, s.vocabulary * h / (q * q));
  elements += vector_elements(q, d, s.seq * h);
  elements += linear_elements(q, d, t, h, s.vocabulary) +
              // X W^T moves the logits in place of X
              3 * (q - 1) / (q * q) * (t * s.vocabulary - t * h) / d;

  // Sums of the norms, twice; of the loss, three times, then its sum and count
  double stats = norms * 2 * reduced(q, 2 * rows);
  stats += 3 * reduced(q, rows) + reduced(d * q, 2);
  if (s.recompute) {
    // The forward of each block again: 12 h^2 weights, 7 h columns that are
    // read, biases of 9 h and two norms
    elements +=
        s.layers * (q - 1) / (q * q) * (7 * t * h / d + 12 * h * h + 13 * h);
    stats += s.layers * 2 * reduced(q, 2 * rows);
  }
  return elements * s.element + stats * s.stat;
}

}  // namespace

double step_bytes(const Sizes& s) {
  return s.q * s.d == 1 ? 0 : s.micro_batches * micro_batch_bytes(s);
}

double parameters_per_rank(const Sizes& s) {
  const double block = 12 * s.h * s.h + 9 * s.h + 4 * s.h;
  const double all =
      (s.vocabulary + s.positions) * s.h + s.layers * block + 2 * s.h;
  return all / (s.q * s.q);
}

double activation_bytes(const Sizes& s, bool is_later) {
  const double e = s.element, stat = s.stat;
  const double n = s.tokens / (s.d * s.q);  // this rank's tokens, ...
  const double w = s.h / s.q, v = s.vocabulary / s.q;  // ... in its columns
  const double x = n * w * e, vector = w * e;
  // A block keeps what it keeps on one device (chapters/common/run/memory.cpp),
  // and its gathered vectors: four of the norms, biases of 9 h
  const double block = 16 * x + n * (4 + s.heads / s.q) * stat + 13 * vector;
  const double kept = s.layers * (s.recompute ? x : block);
  // Of the block whose backward runs, its input is kept anyway
  const double again = s.recompute ? block - x : 0;
  // Later micro-batches hold new gradients of weights beside the accumulated
  // ones. Where a depth adds them up, they are booked as gradients
  const bool adds = is_later && s.d == 1;
  const double head = adds ? v * w * e : 0;
  const double c_proj = adds ? 4 * w * w * e : 0;
  const double scalars = 2 * stat;  // the sum of own losses, the mean
  // ln_f: input, output, its vectors and statistics. Logits and their gradient
  const double at_loss =
      kept + 2 * x + 2 * vector + n * 3 * stat + 2 * n * v * e + scalars;
  const double at_head =
      kept + 3 * x + 2 * vector + n * (v * e + 2 * stat) + head + scalars;
  // The backward of a norm is made of element-wise operations: its input, dy, and
  // six results in the precision of statistics. 16 bits are widened before
  const double norm = 2 * x + n * w * (e < stat ? 7 : 6) * stat + 2 * n * stat;
  const double at_norm =
      kept + norm + 2 * n * stat + 2 * vector + head + scalars;
  // The same of ln_2, when the MLP behind it is done
  const double at_ln_2 =
      kept + again - 9 * x - 5 * vector + norm + head + scalars;
  // dy, the gradient of GELU's output, and of the bias behind it
  const double at_mlp = kept + again + (s.has_dropout ? 6 : 5) * x + vector +
                        head + c_proj + scalars;
  const double at_end = adds ? s.q * x + 2 * head + scalars : 0;
  return std::max({at_loss, at_head, at_norm, at_ln_2, at_mlp, at_end});
}

double buffer_bytes(const Sizes& s) {
  const double buffers = std::min(2.0, s.q - 1);
  return buffers * s.element * std::max(4 * s.h, s.vocabulary) *
         (s.tokens / s.d + s.h) / (s.q * s.q);
}

// --- The trainer -----------------------------------------------------------------

namespace {

Options checked(const Options& options, const Grid& grid,
                const Passes& passes) {
  const ModelConfig config = model_config(options);
  if (config.type != "gpt2") return options;  // ShardedTrainer refuses it
  const int q = grid.q();
  check_divides(
      "--batch", options.batch, passes.micro_batches * grid.row_parts(),
      passes.micro_batches == 1 ? "the batch is cut into"
                                : "micro-batches and ranks cut it into");
  const std::string model = "--model " + options.model;
  check_divides(model + ": n_head", config.n_head, q, "heads are cut into");
  check_divides(model + ": n_embd", config.n_embd, q * q,
                "vectors are cut into");
  return options;
}

ShardedModel sharded_model(const Options& options, const Grid& grid) {
  const std::int64_t vocabulary = model_config(options).vocab_size;
  ShardedModel model;
  model.layers = layers(grid, vocabulary);
  const int q = grid.q();
  model.layout = [q](const std::string& name, int rank) {
    return layout(name, place_of(rank, q));
  };
  model.padded_vocabulary = padded_vocabulary(vocabulary, q);
  return model;
}

}  // namespace

Trainer::Trainer(const Options& options, const Grid& grid, ProcessGroup& group,
                 const Passes& passes)
    : ShardedTrainer(checked(options, grid, passes),
                     sharded_model(options, grid), group, passes.micro_batches,
                     passes.recompute),
      grid_(grid),
      passes_(passes) {}

Sizes Trainer::sizes() const {
  Sizes s;
  s.q = grid_.q();
  s.d = grid_.d();
  s.micro_batches = static_cast<double>(passes_.micro_batches);
  s.recompute = passes_.recompute;
  s.tokens =
      static_cast<double>(options_.batch * options_.seq) / s.micro_batches;
  s.seq = static_cast<double>(options_.seq);
  s.h = static_cast<double>(config().n_embd);
  s.heads = static_cast<double>(config().n_head);
  s.layers = static_cast<double>(config().n_layer);
  s.positions = static_cast<double>(config().n_positions);
  s.vocabulary =
      static_cast<double>(padded_vocabulary(config().vocab_size, grid_.q()));
  s.element = static_cast<double>(dtype_bytes(options_.dtype));
  s.stat = options_.dtype == DType::kF64 ? 8 : 4;
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
  // embedding. Before, with a depth, that of the positions lies beside its part
  const double table = s.vocabulary * s.h / (s.q * s.q) * s.element;
  const double positions = s.seq * s.h / (s.q * s.q) * s.element;
  bill[MemoryKind::kGradient] =
      part + std::max(table, s.d == 1 ? 0 : positions);
  // With a depth, a gradient of a later micro-batch is one beside the sum so far:
  // beside the head's that of c_fc and of its bias, of positions, or of the
  // embedding
  if (s.d > 1 && s.micro_batches > 1) {
    const double c_fc = (4 * s.h * s.h + 4 * s.h) / (s.q * s.q) * s.element;
    bill[MemoryKind::kGradient] =
        part + table + std::max({table, c_fc, positions});
  }
  bill[MemoryKind::kOptimizerState] *= part / whole;
  bill[MemoryKind::kCommunication] =
      // The norm of the gradient, or sum, count and gradient of the loss
      std::max({buffer_bytes(s), 8.0, grid_.num_ranks() > 1 ? 3 * s.stat : 0});
  double& activations = bill[MemoryKind::kActivation];
  if (s.q > 1) {
    activations = activation_bytes(s, /*is_later=*/false);
    if (s.micro_batches > 1) {
      activations = std::max(activations, activation_bytes(s, true));
    }
  } else if (s.d > 1) {
    // One device with a part of the rows
    activations =
        single_device_bill(options_, config(),
                           options_.batch / (passes_.micro_batches * grid_.d()),
                           passes_.recompute)[MemoryKind::kActivation];
  }
  return bill;
}

// --- The documents' MLP ------------------------------------------------------------

std::string describe_mlp(int q, int d) {
  constexpr std::int64_t kRows = 16, kWidth = 256, kInner = 1024;
  if (kRows % (q * d) != 0 || kWidth % (q * q) != 0) return "";
  const auto block = [q](std::int64_t rows, std::int64_t columns) {
    return shape_text({rows / q, columns / q});
  };
  const std::int64_t rows = kRows / d;
  const double moved = linear_elements(q, d, kRows, kWidth, kInner) +
                       linear_elements(q, d, kRows, kInner, kWidth);
  return "An MLP of [16, 256], 256 -> 1024 -> 256: on each rank input " +
         block(rows, kWidth) + ", weights " + block(kWidth, kInner) + " and " +
         block(kInner, kWidth) + ", outputs " + block(rows, kInner) + " and " +
         block(rows, kWidth) + "; " + std::to_string(std::llround(moved)) +
         " elements sent per rank, forward and backward\n";
}

std::string Trainer::remarks() { return describe_mlp(grid_.q(), grid_.d()); }

}  // namespace shardbook::summa
