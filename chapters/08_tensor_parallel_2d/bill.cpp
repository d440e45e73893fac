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

  // Weights and biases
  double elements =
      s.layers * over_linears(h, [&](double k, double n) {
        return linear_elements(q, d, t, k, n) + vector_elements(q, d, n);
      });
  elements += norms * 2 * vector_elements(q, d, h);
  // Tokens: reduce_scatter forward, all_gather backward; positions
  elements += 2 * (q - 1) / q * t * h / (d * q);
  elements += reduced(d, s.vocabulary * h / (q * q));
  elements += vector_elements(q, d, s.seq * h);
  elements += linear_elements(q, d, t, h, s.vocabulary) +
              // X W^T sends logits instead of X
              3 * (q - 1) / (q * q) * (t * s.vocabulary - t * h) / d;

  // Norms sum twice, the loss three times; then its sum and count
  double stats = norms * 2 * reduced(q, 2 * rows);
  stats += 3 * reduced(q, rows) + reduced(d * q, 2);
  if (s.recompute) {
    // Recomputed blocks: 12 h^2 weights, inputs of 7 h columns, biases of 9 h,
    // two norms
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

double kept_bytes(const Sizes& s) {
  const double e = s.element, stat = s.stat;
  const double n = s.tokens / (s.d * s.q);  // this rank's tokens, ...
  const double w = s.h / s.q, v = s.vocabulary / s.q;  // ... in its columns
  const double x = n * w * e;
  const double vector = s.q > 1 ? w * e : 0;  // gathered
  // A block keeps the same as on one device (chapters/common/run/kept.cpp),
  // plus gathered vectors: four of the norms, biases of 9 h
  const double block = 16 * x + n * (4 + s.heads / s.q) * stat + 13 * vector;
  // ln_f: input, output, its vectors and statistics. Logits and the loss
  return s.layers * (s.recompute ? x : block) + 2 * x + 2 * vector +
         n * (3 * stat + v * e) + stat;
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
  double there(double n) const { return all_gather(q, element * n / q); }
  double back(double n) const { return there(n) + over_depth(n); }
  /// Sums the gradient of a parameter of n elements.
  double over_depth(double n) const {
    return all_reduce(d, element * n / (q * q));
  }

  double linear_forward(double k, double n) const {
    return there(n) + ab(tokens, k, n);
  }
  double linear_backward(double k, double n) const {
    return reduced(tokens, n, k, w(k, n), x(k)) +
           reduced(tokens, k, n, x(k), w(k, n)) + over_depth(k * n) + back(n);
  }
  /// A norm's sums, the same forward and backward.
  double sums() const { return all_reduce(q, 2 * stat * rows()); }
  double norm_forward() const { return sums() + 2 * there(h); }
  double norm_backward() const { return sums() + 2 * back(h); }
  /// The two products of attention.
  double attention() const {
    return 2 * (seq + 1) * h * tokens / (d * q * q) / textbook::kRate;
  }
  double block_forward() const {
    return 2 * norm_forward() + attention() +
           over_linears(
               h, [this](double k, double n) { return linear_forward(k, n); });
  }
  double block_backward() const {
    return 2 * norm_backward() + 2.5 * attention() +
           over_linears(
               h, [this](double k, double n) { return linear_backward(k, n); });
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
    return 2 * all_gather(q, element * rows() * h) +
           over_depth(vocabulary * h) + there(seq * h) + back(seq * h);
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
  return s.micro_batches * StepTime{s}.micro_batch() +
         all_reduce(s.d * s.q * s.q, 8);  // the norm
}

}  // namespace shardbook::summa
