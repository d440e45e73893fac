#include "chapters/10_tensor_parallel_3d/bill.h"

#include <algorithm>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::cube {

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
  // A vector of n: its gradient is added up over l^2 ranks
  const auto vector = [&](double n) { return reduced(l * l, n / l); };
  const double norms = 2 * s.layers + 1;

  // Weights and biases
  double elements = s.layers * summa::over_linears(h, [&](double k, double n) {
                      return linear(k, n) + vector(n);
                    });
  elements += norms * 2 * vector(h);
  // The table over WEIGHT and its tokens over INPUT, forward and backward
  elements += 2 * (l - 1) / (l * l * l) * (s.vocabulary * h + t * h);
  elements += vector(s.seq * h);
  elements += linear(h, s.vocabulary);

  const double rows = t / (l * l);
  double stats = norms * 2 * reduced(l, 2 * rows);
  stats += 3 * reduced(l, rows) + 2 * reduced(l, 2);
  if (s.recompute) {
    // Recomputed blocks: columns that are read and written, weights
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

double kept_bytes(const Sizes& s) {
  const double e = s.element, stat = s.stat, l = s.l;
  const double n = s.tokens / (l * l);             // this rank's tokens, ...
  const double w = s.h / l, v = s.vocabulary / l;  // ... in its columns
  const double x = n * w * e;
  // Gathered: a weight [h, h], the table
  const double square = l > 1 ? w * w * e : 0, table = l > 1 ? v * w * e : 0;
  // A block keeps the same as on one device (chapters/common/run/kept.cpp). Its
  // four products read 7h per token and 12h^2 weights
  const bool keeps = s.keep_gathered && l > 1;
  const double gathered = 7 * l * x + 12 * square;
  const double block =
      16 * x + n * (4 + s.heads / l) * stat + (keeps ? gathered : 0);
  const double head =
      (keeps ? l * x + table : 0) + 2 * x + n * (v * e + 3 * stat) + stat;
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
  double vector(double n) const { return all_reduce(l * l, element * n / l); }
  /// A norm's sums, the same forward and backward.
  double sums() const { return all_reduce(l, 2 * stat * tokens / (l * l)); }
  /// The two products of attention.
  double attention() const {
    return 2 * (seq + 1) * h * tokens / (l * l * l) / textbook::kRate;
  }
  double block_forward() const {
    return 2 * sums() + attention() +
           summa::over_linears(
               h, [this](double k, double n) { return linear_forward(k, n); });
  }
  double block_backward() const {
    const double norms = 2 * (sums() + 2 * vector(h));
    return norms + 2.5 * attention() +
           summa::over_linears(h, [this](double k, double n) {
             return linear_backward(k, n) + vector(n);
           });
  }
  double ends() const {
    const double embedding =
        2 * moved(vocabulary, h) + 2 * moved(tokens, h) + vector(seq * h);
    const double norm = 2 * sums() + 2 * vector(h);
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
  const double forwards = s.recompute ? 2 : 1;
  const double blocks =
      s.layers * (forwards * time.block_forward() + time.block_backward());
  return s.micro_batches * (time.ends() + blocks) +
         all_reduce(s.l * s.l * s.l, 8);  // the norm
}

}  // namespace shardbook::cube
