#include <utility>

#include "core/kernels/softmax.h"
#include "core/kernels/vocabulary.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::kIgnoreIndex;
using kernels::kInf;
using kernels::noise;
using kernels::tolerance;

/// The CPU's test shapes, none, and rows of every kind in rows.h.
const Matrix kSoftmaxRows[] = {{0, 5},    {1, 1},    {3, 7},    {20, 65},
                               {5, 256},  {2, 1000}, {2, 1001}, {3, 2048},
                               {2, 2051}, {2, 8200}, {2, 8201}};

kernels::VocabularyPart whole(std::int64_t rows, std::int64_t cols) {
  return {rows, cols, 0, cols};
}

/// Targets of all classes; every third is ignored.
std::vector<double> some_targets(std::int64_t rows, std::int64_t cols) {
  std::vector<double> targets(rows);
  for (std::int64_t r = 0; r < rows; ++r) {
    targets[r] = static_cast<double>(r % 3 == 1 ? kIgnoreIndex
                                                : (7919 * r + cols - 1) % cols);
  }
  return targets;
}

class SoftmaxParity : public ParityTest {
 protected:
  /// softmax, log_softmax and cross_entropy of the same rows.
  void check_all(std::int64_t rows, std::int64_t cols,
                 const std::vector<double>& values,
                 const std::vector<double>& targets) const {
    Comparison c(dtype);
    const Slot x = c.array(values);
    for (const bool log : {false, true}) {
      c.expect_equal(kernels::softmax, tolerance(dtype), dtype, rows, cols, x,
                     c.empty(rows * cols), log);
    }
    c.expect_equal(kernels::cross_entropy, tolerance(dtype), dtype, rows, cols,
                   x, c.array(DType::kI64, targets), c.empty(stat, rows),
                   c.empty(stat, rows));
  }
};

TEST_P(SoftmaxParity, SoftmaxEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool in_place : {false, true}) {
      for (const bool log : {false, true}) {
        Comparison c(dtype);
        const Slot x = c.array(scaled(20, noise(rows * cols, 1)));
        c.expect_equal(kernels::softmax, 5 * tolerance(dtype), dtype, rows,
                       cols, x, in_place ? x : c.empty(rows * cols), log);
      }
    }
  }
}

TEST_P(SoftmaxParity, BackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool in_place : {false, true}) {
      for (const bool log : {false, true}) {
        Comparison c(dtype);
        const Slot dy = c.noise(rows * cols, 2);
        // Sums of up to 8201 terms
        const double close =
            2 * tolerance(dtype) +
            static_cast<double>(cols + 1000) / 100 * tolerance(stat);
        c.expect_equal(kernels::softmax_backward, close, dtype, rows, cols,
                       c.noise(rows * cols, 1), dy,
                       in_place ? dy : c.empty(rows * cols), log);
      }
    }
  }
}

// Masked elements, a row of them, and rows that have no softmax.
TEST_P(SoftmaxParity, InfinitiesAndNansEqualTheCpus) {
  check_all(5, 3,
            {1, -kInf, 1, -kInf, -kInf, 0, -kInf, -kInf, -kInf, 0,
             kernels::kNan, 1, kInf, 0.5, -kInf},
            {0, 2, 1, 0, 1});
}

// Threads whose elements are all masked, beside others.
TEST_P(SoftmaxParity, LongMaskedRowsEqualTheCpus) {
  const std::int64_t cols = 3001;
  std::vector<double> values(2 * cols, -kInf);
  for (std::int64_t i = 0; i < 16; ++i) {
    values[1600 + i] = values[4003 + i] = static_cast<double>(i) / 4;
  }
  check_all(2, cols, values, {1603, 1002});
}

// GPT-2's vocabulary: an odd length, over which the second row is not aligned.
TEST_P(SoftmaxParity, RowsOfAVocabularyEqualTheCpus) {
  const std::int64_t rows = 2, cols = 50257;
  check_all(rows, cols, scaled(5, noise(rows * cols, 3)), {50256, 7919});
  Comparison c(dtype);
  c.expect_equal(kernels::vocabulary_gradient, 2 * tolerance(dtype), dtype,
                 whole(rows, cols), c.noise(rows * cols, 4),
                 c.array(DType::kI64, {50256, 7919}), c.array(stat, {10.5, 11}),
                 c.array(stat, {0.125}), /*mean=*/true, c.empty(rows * cols));
}

TEST_P(SoftmaxParity, CrossEntropyEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool wants_total : {true, false}) {
      Comparison c(dtype);
      c.expect_equal(kernels::cross_entropy, 10 * tolerance(stat), dtype, rows,
                     cols, c.array(scaled(5, noise(rows * cols, 3))),
                     c.array(DType::kI64, some_targets(rows, cols)),
                     c.empty(stat, rows),
                     wants_total ? c.empty(stat, rows) : c.null());
    }
  }
}

TEST_P(SoftmaxParity, CrossEntropyBackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool mean : {true, false}) {
      Comparison c(dtype);
      const Slot logits = c.array(scaled(2, noise(rows * cols, 3)));
      c.expect_equal(kernels::vocabulary_gradient, 2 * tolerance(dtype), dtype,
                     whole(rows, cols), logits,
                     c.array(DType::kI64, some_targets(rows, cols)),
                     c.array(stat, std::vector<double>(rows, 1.5)),
                     c.array(stat, {0.125}), mean,
                     mean ? c.empty(rows * cols) : logits);
    }
  }
}

// Arrays whose rows meet whole vectors at different elements, and both at
// others than the arrays' first.
TEST_P(SoftmaxParity, ArraysMayBeginAnywhere) {
  const std::int64_t rows = 3, cols = 1501;
  const std::pair<std::int64_t, std::int64_t> begins[] = {
      {1, 0}, {1, 1}, {0, 3}};
  for (const auto& [from, to] : begins) {
    Comparison c(dtype);
    const Slot logits = c.noise(rows * cols + from, 3);
    const Slot grad = c.noise(rows * cols + to, 4);
    const Slot targets = c.array(DType::kI64, some_targets(rows, cols));
    const Slot loss = c.empty(stat, rows), total = c.empty(stat, rows);
    const Slot dloss = c.array(stat, {0.125});
    c.expect_equal_in(10 * tolerance(dtype), [&, from = from,
                                              to = to](const auto& on) {
      const Pointer x = on.from(logits, from), dx = on.from(grad, to);
      kernels::cross_entropy(on.context, dtype, rows, cols, x, on(targets),
                             on(loss), on(total));
      kernels::vocabulary_gradient(on.context, dtype, whole(rows, cols), x,
                                   on(targets), on(total), on(dloss), true, dx);
      kernels::softmax_backward(on.context, dtype, rows, cols, x, dx, dx);
    });
  }
}

TEST_P(SoftmaxParity, ReducedLossesEqualTheCpus) {
  for (const std::int64_t rows : {0, 1, 31, 33, 1024, 5001}) {
    for (const bool mean : {true, false}) {
      Comparison c(stat);
      c.expect_equal(kernels::reduce_losses, 10 * tolerance(stat), stat, rows,
                     c.noise(rows, 1),
                     c.array(DType::kI64, some_targets(rows, 4)), mean,
                     c.empty(1));
    }
  }
}

SB_OVER_FLOATING_DTYPES(SoftmaxParity);

}  // namespace
}  // namespace shardbook::parity
