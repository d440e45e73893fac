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

double step_bytes(const Sizes& s) {
  const double q = s.q, d = s.d, t = s.tokens, h = s.h;
  if (q * d == 1) return 0;
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
  return elements * s.element + stats * s.stat;
}

double parameters_per_rank(const Sizes& s) {
  const double block = 12 * s.h * s.h + 9 * s.h + 4 * s.h;
  const double all =
      (s.vocabulary + s.positions) * s.h + s.layers * block + 2 * s.h;
  return all / (s.q * s.q);
}

double activation_bytes(const Sizes& s) {
  const double e = s.element, stat = s.stat;
  const double n = s.tokens / (s.d * s.q);  // this rank's tokens, ...
  const double w = s.h / s.q, v = s.vocabulary / s.q;  // ... in its columns
  const bool is_gathered = s.q > 1;
  // A block keeps what it keeps on one device (chapters/common/run/memory.cpp),
  // and its gathered vectors: four of the norms, biases of 9 h
  const double block = n * (16 * w * e + (4 + s.heads / s.q) * stat) +
                       (is_gathered ? 13 * w * e : 0);
  const double blocks = s.layers * block;
  const double vectors = is_gathered ? 2 * w * e : 0;  // of ln_f
  // Logits and their gradient, two scalars: the sum of own losses, the mean
  const double at_loss = blocks + n * (2 * w * e + 2 * stat) + vectors +
                         n * (2 * v * e + stat) + 2 * stat;
  const double at_head =
      blocks + n * ((3 * w + v) * e + 2 * stat) + vectors + 2 * stat;
  const double at_block =
      blocks + (s.has_dropout ? 6 : 5) * n * w * e + 2 * stat;
  // The backward of ln_f is made of element-wise operations: its input, dy, and
  // six results in the precision of statistics. 16 bits are widened before
  const double given = e < stat ? 2 * e + stat : 2 * e;
  const double at_norm =
      blocks + n * (w * (given + 6 * stat) + 4 * stat) + vectors + 2 * stat;
  return std::max({at_loss, at_head, at_block, is_gathered ? at_norm : 0.0});
}

double buffer_bytes(const Sizes& s) {
  const double buffers = std::min(2.0, s.q - 1);
  return buffers * s.element * std::max(4 * s.h, s.vocabulary) *
         (s.tokens / s.d + s.h) / (s.q * s.q);
}

// --- The trainer -----------------------------------------------------------------

namespace {

Options checked(const Options& options, const Grid& grid) {
  const ModelConfig config = model_config(options);
  if (config.type != "gpt2") return options;  // ShardedTrainer refuses it
  const int q = grid.q();
  check_divides("--batch", options.batch, grid.row_parts(),
                "the batch is cut into");
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

Trainer::Trainer(const Options& options, const Grid& grid, ProcessGroup& group)
    : ShardedTrainer(checked(options, grid), sharded_model(options, grid),
                     group),
      grid_(grid) {}

Sizes Trainer::sizes() const {
  Sizes s;
  s.q = grid_.q();
  s.d = grid_.d();
  s.tokens = static_cast<double>(options_.batch * options_.seq);
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
  MemoryBill bill = single_device_bill(options_, config(), options_.batch);
  const Sizes s = sizes();
  const double whole = bill[MemoryKind::kParameter];
  const double part = parameters_per_rank(s) * s.element;
  bill[MemoryKind::kParameter] = part;
  if (options_.steps == 0) return bill;
  // At the end of backward the table has a gradient of the head and one of the
  // embedding. Before, with a depth, that of the positions lies beside its part
  const double table = s.vocabulary * s.h / (s.q * s.q) * s.element;
  const double positions = s.d == 1 ? 0 : s.seq * s.h / (s.q * s.q) * s.element;
  bill[MemoryKind::kGradient] = part + std::max(table, positions);
  bill[MemoryKind::kOptimizerState] *= part / whole;
  bill[MemoryKind::kCommunication] =
      // The norm of the gradient, or sum, count and gradient of the loss
      std::max({buffer_bytes(s), 8.0, grid_.num_ranks() > 1 ? 3 * s.stat : 0});
  if (grid_.num_ranks() > 1) {
    bill[MemoryKind::kActivation] = activation_bytes(s);
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
