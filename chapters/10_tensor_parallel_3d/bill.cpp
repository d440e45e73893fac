#include "chapters/10_tensor_parallel_3d/bill.h"

#include <algorithm>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::cube {

using summa::over_products;

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

/// Traffic of one micro-batch.
double micro_batch_bytes(const Sizes& s) {
  const double l = s.l, t = s.tokens, h = s.h;
  const auto linear = [&](double k, double n) {
    return linear_elements(l, t, k, n, s.keep_gathered);
  };
  const BlockPart& norm = s.block.norm_1;
  // A vector of n: its gradient is added up over l^2 ranks
  const auto vector = [&](double n) { return reduced(l * l, n / l); };
  const double norms = 2 * s.layers + 1;

  // Weights, biases and norms
  double elements =
      s.layers * over_products(s.block, [&](double k, double n, double) {
        return linear(k, n);
      });
  elements +=
      vector(s.layers * summa::vector_sizes(s.block) + norm.parameters());
  // The table over WEIGHT and its tokens over INPUT, forward and backward
  elements += 2 * (l - 1) / (l * l * l) * (s.vocabulary * h + t * h);
  if (s.positions > 0) elements += vector(s.seq * h);
  elements += linear(h, s.vocabulary);

  const double rows = t / (l * l);
  const double sums = reduced(l, norm.statistics() * rows);
  double stats = norms * 2 * sums;
  stats += 3 * reduced(l, rows) + 2 * reduced(l, 2);
  if (s.recompute) {
    // Recomputed blocks: columns that are read and written, weights
    const double blocks = over_products(
        s.block,
        [&](double k, double n, double) { return t * (k + n) + k * n; });
    elements += s.layers * (l - 1) / (l * l * l) * blocks;
    stats += s.layers * 2 * sums;
  }
  return elements * s.element + stats * s.stat;
}

}  // namespace

double step_bytes(const Sizes& s) {
  if (s.l == 1) return 0;
  return s.micro_batches * micro_batch_bytes(s) +
         reduced(s.l * s.l * s.l, summa::head_norms(s)) * s.element;
}

double parameters_per_rank(const Sizes& s) {
  const double weights =
      over_products(s.block, [](double k, double n, double) { return k * n; });
  const double matrices = s.layers * weights + s.tables * s.vocabulary * s.h;
  const double vectors = s.layers * summa::vector_sizes(s.block) +
                         s.block.norm_1.parameters() + s.positions * s.h;
  return matrices / (s.l * s.l * s.l) + vectors / s.l + summa::head_norms(s);
}

double kept_bytes(const Sizes& s) {
  const double e = s.element, stat = s.stat, l = s.l;
  const double n = s.tokens / (l * l);             // this rank's tokens, ...
  const double w = s.h / l, v = s.vocabulary / l;  // ... in its columns
  const double x = n * w * e;
  const double table = l > 1 ? v * w * e : 0;  // gathered
  // A block keeps the same as on one device, and products what they gathered
  const bool keeps = s.keep_gathered && l > 1;
  const double gathered =
      over_products(s.block, [&](double in, double out, double) {
        return (l * n * (in / l) + (in / l) * (out / l)) * e;
      });
  double block = keeps ? gathered : 0;
  for (const BlockPart& part : s.block.parts()) {
    block += n * (part.kept() / l * e + part.statistics(l) * stat);
  }
  const double statistics = s.block.norm_1.statistics() + 1;
  const double head = (keeps ? l * x + table : 0) + 2 * x +
                      n * (v * e + statistics * stat) + stat;
  // The embedding keeps its gathered table; the head gathers it again
  return s.layers * (s.recompute ? x : block) + table + head;
}

// --- Time ------------------------------------------------------------------------

namespace {

using textbook::all_gather;
using textbook::all_reduce;

/// Seconds of one micro-batch, as on the page: operands arrive together, and the
/// sum of dX travels while dW is computed.
struct StepTime : Sizes {
  /// A matrix moves along one axis: an all_gather or a reduce_scatter.
  double moved(double rows, double columns) const {
    return all_gather(l, element * rows * columns / (l * l));
  }
  double product(double k, double n) const {
    return 2 * tokens * k * n / (l * l * l) / textbook::kRate;
  }
  double linear_forward(double k, double n) const {
    return std::max(moved(tokens, k), moved(k, n)) + product(k, n) +
           moved(tokens, n);
  }
  double linear_backward(double k, double n) const {
    const double x = moved(tokens, k), w = moved(k, n), y = moved(tokens, n);
    const double g = product(k, n);
    // dX waits for dY and the weight, dW for x too
    const double dx = keep_gathered ? y + g : std::max(std::max(y, w) + g, x);
    return dx + std::max(g, x) + w;
  }
  /// Sums the gradient of a vector's part of n.
  double vector(double n) const {
    return n > 0 ? all_reduce(l * l, element * n / l) : 0;
  }
  /// A norm's sums, the same forward and backward.
  double sums() const {
    return all_reduce(l, block.norm_1.statistics() * stat * tokens / (l * l));
  }
  /// Adds the gradients of a norm's vectors: RMSNorm has one.
  double norm_vectors() const {
    return block.norm_1.parameters() / h * vector(h);
  }
  /// The two products of attention.
  double attention() const {
    return block.attention.operations(seq) * tokens / (l * l * l) /
           textbook::kRate;
  }
  double block_forward() const {
    return 2 * sums() + attention() +
           over_products(block, [this](double k, double n, double) {
             return linear_forward(k, n);
           });
  }
  double block_backward() const {
    const double norms = 2 * (sums() + norm_vectors());
    return norms + 2.5 * attention() +
           over_products(block, [this](double k, double n, double b) {
             return linear_backward(k, n) + vector(b);
           });
  }
  double ends() const {
    const double embedding = 2 * moved(vocabulary, h) + 2 * moved(tokens, h) +
                             vector(positions > 0 ? seq * h : 0);
    const double norm = 2 * sums() + norm_vectors();
    const double head =
        linear_forward(h, vocabulary) + linear_backward(h, vocabulary);
    const double loss = 3 * all_reduce(l, stat * tokens / (l * l)) +
                        2 * all_reduce(l, 2 * stat);
    return embedding + norm + head + loss;
  }
};

}  // namespace

double step_s(const Sizes& s) {
  const StepTime time{s};
  const double ranks = s.l * s.l * s.l, of_heads = summa::head_norms(s);
  const double forwards = s.recompute ? 2 : 1;
  const double blocks =
      s.layers * (forwards * time.block_forward() + time.block_backward());
  return s.micro_batches * (time.ends() + blocks) +
         (of_heads > 0 ? all_reduce(ranks, of_heads * s.element) : 0) +
         all_reduce(ranks, 8);  // the norm
}

}  // namespace shardbook::cube
