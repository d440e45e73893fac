#include "chapters/08_tensor_parallel_2d/bill.h"

#include <algorithm>

#include "chapters/common/run/textbook.h"

namespace shardbook::summa {

namespace {

/// all_reduce of n elements over p ranks.
double reduced(double p, double n) { return 2 * (p - 1) / p * n; }

/// A vector of n: gathered over COL forward, scattered backward, and added over
/// the depth.
double vector_elements(double q, double d, double n) {
  return 2 * (q - 1) / q * n / q + reduced(d, n / (q * q));
}

}  // namespace

double vector_sizes(const BlockTable& block) {
  const double norms = block.norm_1.parameters() + block.norm_2.parameters();
  return norms +
         over_products(block, [](double, double, double b) { return b; });
}

double head_norms(const ShardedSizes& s) {
  double elements = 0;
  for (const BlockPart& norm : s.block.head_norms) {
    elements += s.layers * norm.parameters();
  }
  return elements;
}

double linear_elements(double q, double d, double m, double k, double n) {
  return 3 * (q - 1) / (q * q) * (m * k / d + k * n) +
         reduced(d, k * n / (q * q));
}

namespace {

/// Traffic of one micro-batch.
double micro_batch_bytes(const Sizes& s) {
  const double q = s.q, d = s.d, t = s.tokens, h = s.h;
  const double rows = t / (d * q);  // tokens of this rank
  const double norms = 2 * s.layers + 1;
  const BlockPart& norm = s.block.norm_1;

  // Weights, biases and norms
  double elements =
      s.layers * over_products(s.block, [&](double k, double n, double) {
        return linear_elements(q, d, t, k, n);
      });
  elements += vector_elements(
      q, d, s.layers * vector_sizes(s.block) + norm.parameters());
  // Tokens: reduce_scatter forward, all_gather backward; positions
  elements += 2 * (q - 1) / q * t * h / (d * q);
  elements += reduced(d, s.vocabulary * h / (q * q));
  if (s.positions > 0) elements += vector_elements(q, d, s.seq * h);
  elements += linear_elements(q, d, t, h, s.vocabulary) +
              // X W^T sends logits instead of X
              3 * (q - 1) / (q * q) * (t * s.vocabulary - t * h) / d;

  // Norms sum twice (RMSNorm: one number), the loss three times; then its sum and
  // count
  const double sums = reduced(q, norm.statistics() * rows);
  double stats = norms * 2 * sums;
  stats += 3 * reduced(q, rows) + reduced(d * q, 2);
  if (s.recompute) {
    // Recomputed blocks: inputs of products, weights, vectors
    const double products = over_products(
        s.block, [&](double k, double n, double) { return t * k / d + k * n; });
    elements +=
        s.layers * (q - 1) / (q * q) * (products + vector_sizes(s.block));
    stats += s.layers * 2 * sums;
  }
  return elements * s.element + stats * s.stat;
}

}  // namespace

double step_bytes(const Sizes& s) {
  if (s.q * s.d == 1) return 0;
  return s.micro_batches * micro_batch_bytes(s) +
         reduced(s.d * s.q * s.q, head_norms(s)) * s.element;
}

double parameters_per_rank(const Sizes& s) {
  double block = 0;
  for (const BlockPart& part : s.block.parts()) block += part.parameters();
  const double whole = head_norms(s);
  const double cut = (s.tables * s.vocabulary + s.positions) * s.h +
                     s.layers * block - whole + s.block.norm_1.parameters();
  return cut / (s.q * s.q) + whole;
}

double kept_bytes(const Sizes& s) {
  const double e = s.element, stat = s.stat;
  const double n = s.tokens / (s.d * s.q);  // this rank's tokens, ...
  const double w = s.h / s.q, v = s.vocabulary / s.q;  // ... in its columns
  const double x = n * w * e;
  const double gathered = s.q > 1 ? e / s.q : 0;  // for an element of a vector
  // A block keeps the same as on one device, plus gathered vectors
  double block = vector_sizes(s.block) * gathered;
  for (const BlockPart& part : s.block.parts()) {
    block += n * (part.kept() / s.q * e + part.statistics(s.q) * stat);
  }
  // The last norm: input, output, its vectors and statistics. Logits and the loss
  const BlockPart& norm = s.block.norm_1;
  return s.layers * (s.recompute ? x : block) + 2 * x +
         norm.parameters() * gathered +
         n * ((norm.statistics() + 1) * stat + v * e) + stat;
}

// --- Time ------------------------------------------------------------------------

namespace {

using textbook::all_gather;
using textbook::all_reduce;
using textbook::broadcast;

/// Seconds of one micro-batch, as on the page.
struct StepTime : Sizes {
  double product(double m, double k, double n) const {
    return 2 * m * k * n / (d * q * q * q) / textbook::kRate;
  }
  double rows() const { return tokens / (d * q); }
  /// Elements of a rank's block of an activation, and of a weight.
  double x(double columns) const { return tokens * columns / (d * q * q); }
  double w(double k, double n) const { return k * n / (q * q); }

  /// C = A B: a product overlaps the next step's broadcasts.
  double ab(double m, double k, double n) const {
    const double arrives =
        std::max(broadcast(q, element * x(k)), broadcast(q, element * w(k, n)));
    const double g = product(m, k, n);
    return arrives + (q - 1) * std::max(arrives, g) + g;
  }
  /// C = A B^T, A^T B: a block of `in` elements arrives, one of `out` leaves.
  double reduced(double m, double k, double n, double in, double out) const {
    const double arrives = broadcast(q, element * in);
    const double leaves = broadcast(q, element * out);
    const double g = product(m, k, n);
    return arrives + g + leaves + (q - 1) * std::max({arrives, g, leaves});
  }
  /// A vector of n is gathered over COL, its gradient scattered.
  double there(double n) const {
    return n > 0 ? all_gather(q, element * n / q) : 0;
  }
  double back(double n) const { return there(n) + over_depth(n); }
  /// Sums the gradient of a parameter of n elements.
  double over_depth(double n) const {
    return n > 0 ? all_reduce(d, element * n / (q * q)) : 0;
  }

  double linear_forward(double k, double n, double b) const {
    return there(b) + ab(tokens, k, n);
  }
  double linear_backward(double k, double n, double b) const {
    return reduced(tokens, n, k, w(k, n), x(k)) +
           reduced(tokens, k, n, x(k), w(k, n)) + over_depth(k * n) + back(b);
  }
  /// A norm's sums, the same forward and backward.
  double sums() const {
    return all_reduce(q, block.norm_1.statistics() * stat * rows());
  }
  /// Vectors of a norm: RMSNorm has one.
  double vectors() const { return block.norm_1.parameters() / h; }
  double norm_forward() const { return sums() + vectors() * there(h); }
  double norm_backward() const { return sums() + vectors() * back(h); }
  /// The two products of attention.
  double attention() const {
    return block.attention.operations(seq) * tokens / (d * q * q) /
           textbook::kRate;
  }
  double block_forward() const {
    return 2 * norm_forward() + attention() +
           over_products(block, [this](double k, double n, double b) {
             return linear_forward(k, n, b);
           });
  }
  double block_backward() const {
    return 2 * norm_backward() + 2.5 * attention() +
           over_products(block, [this](double k, double n, double b) {
             return linear_backward(k, n, b);
           });
  }
  /// Logits are X W^T; backward computes one A B and one A^T B.
  double head() const {
    const double table = w(vocabulary, h), logits = x(vocabulary);
    return reduced(tokens, h, vocabulary, table, logits) +
           ab(tokens, vocabulary, h) +
           reduced(tokens, vocabulary, h, logits, table) +
           over_depth(vocabulary * h);
  }
  double embedding() const {
    const double placed = positions > 0 ? seq * h : 0;
    return 2 * all_gather(q, element * rows() * h) +
           over_depth(vocabulary * h) + there(placed) + back(placed);
  }
  double loss() const {
    return 3 * all_reduce(q, stat * rows()) + all_reduce(d * q, 2 * stat);
  }
  double micro_batch() const {
    const double forwards = recompute ? 2 : 1;
    return embedding() +
           layers * (forwards * block_forward() + block_backward()) +
           norm_forward() + norm_backward() + head() + loss();
  }
};

}  // namespace

double step_s(const Sizes& s) {
  const double ranks = s.d * s.q * s.q, of_heads = head_norms(s);
  return s.micro_batches * StepTime{s}.micro_batch() +
         (of_heads > 0 ? all_reduce(ranks, of_heads * s.element) : 0) +
         all_reduce(ranks, 8);  // the norm
}

}  // namespace shardbook::summa
