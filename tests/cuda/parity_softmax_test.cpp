#include <limits>
#include <string>

#include "core/check.h"
#include "core/kernels/reduce.h"
#include "core/kernels/softmax.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::kIgnoreIndex;
using kernels::kInf;
using kernels::noise;
using kernels::stat_dtype;
using kernels::tolerance;

struct SoftmaxRows {
  std::int64_t rows, cols;
};
/// The CPU's test shapes, none, and rows of every kind in rows.h.
const SoftmaxRows kSoftmaxRows[] = {{0, 5},    {1, 1},    {3, 7},    {20, 65},
                                    {5, 256},  {2, 1000}, {2, 1001}, {3, 2048},
                                    {2, 2051}, {2, 8200}, {2, 8201}};

std::vector<double> scaled(double factor, std::vector<double> values) {
  for (double& v : values) v *= factor;
  return values;
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

class SoftmaxParity : public ParityTest {};

TEST_P(SoftmaxParity, SoftmaxEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool in_place : {false, true}) {
      for (const bool log : {false, true}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << cols);
        Comparison c;
        const Slot x = c.array(dtype, scaled(20, noise(rows * cols, 1)));
        const Slot y = in_place ? x : c.empty(dtype, rows * cols);
        const auto& kernel = log ? kernels::log_softmax : kernels::softmax;
        c.expect_equal(kernel, 5 * tolerance(dtype), dtype, rows, cols, x, y);
      }
    }
  }
}

TEST_P(SoftmaxParity, BackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool in_place : {false, true}) {
      for (const bool log : {false, true}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << cols);
        Comparison c;
        const Slot y = c.array(dtype, noise(rows * cols, 1));
        const Slot dy = c.array(dtype, noise(rows * cols, 2));
        const Slot dx = in_place ? dy : c.empty(dtype, rows * cols);
        const auto& kernel =
            log ? kernels::log_softmax_backward : kernels::softmax_backward;
        // Sums of up to 8201 terms
        const double close =
            2 * tolerance(dtype) + static_cast<double>(cols + 1000) / 100 *
                                       tolerance(stat_dtype(dtype));
        c.expect_equal(kernel, close, dtype, rows, cols, y, dy, dx);
      }
    }
  }
}

/// softmax, log_softmax and cross_entropy of the same rows.
void expect_equal_softmax(DType dtype, std::int64_t rows, std::int64_t cols,
                          const std::vector<double>& values,
                          const std::vector<double>& targets) {
  const auto all = [&](KernelContext& context, const void* x, void* y,
                       void* log_y, const std::int64_t* t, void* loss,
                       void* logsumexp) {
    kernels::softmax(context, dtype, rows, cols, x, y);
    kernels::log_softmax(context, dtype, rows, cols, x, log_y);
    kernels::cross_entropy(context, dtype, rows, cols, x, t, loss, logsumexp);
  };
  Comparison c;
  const Slot x = c.array(dtype, values);
  const Slot y = c.empty(dtype, rows * cols);
  const Slot log_y = c.empty(dtype, rows * cols);
  const Slot t = c.array(DType::kI64, targets);
  const Slot loss = c.empty(stat_dtype(dtype), rows);
  const Slot logsumexp = c.empty(stat_dtype(dtype), rows);
  c.expect_equal(all, tolerance(dtype), x, y, log_y, t, loss, logsumexp);
}

TEST_P(SoftmaxParity, InfinitiesAndNansEqualTheCpus) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  // Masked elements, a row of them, and rows that have no softmax
  expect_equal_softmax(dtype, 5, 3,
                       {1, -kInf, 1, -kInf, -kInf, 0, -kInf, -kInf, -kInf, 0,
                        nan, 1, kInf, 0.5, -kInf},
                       {0, 2, 1, 0, 1});
}

// Threads whose elements are all masked, beside others.
TEST_P(SoftmaxParity, LongMaskedRowsEqualTheCpus) {
  const std::int64_t cols = 3001;
  std::vector<double> values(2 * cols, -kInf);
  for (std::int64_t i = 0; i < 16; ++i) {
    values[1600 + i] = values[4003 + i] = static_cast<double>(i) / 4;
  }
  expect_equal_softmax(dtype, 2, cols, values, {1603, 1002});
}

// GPT-2's vocabulary: an odd length, over which the second row is not aligned.
TEST_P(SoftmaxParity, RowsOfAVocabularyEqualTheCpus) {
  const std::int64_t rows = 2, cols = 50257;
  expect_equal_softmax(dtype, rows, cols, scaled(5, noise(rows * cols, 3)),
                       {50256, 7919});
  Comparison c;
  const Slot total = c.array(stat_dtype(dtype), {10.5, 11});
  c.expect_equal(kernels::cross_entropy_backward, 2 * tolerance(dtype), dtype,
                 rows, cols, c.array(dtype, noise(rows * cols, 4)),
                 c.array(DType::kI64, {50256, 7919}), total,
                 c.array(stat_dtype(dtype), {0.125}), /*mean=*/true,
                 c.empty(dtype, rows * cols));
}

TEST_P(SoftmaxParity, CrossEntropyEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool wants_total : {true, false}) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      Comparison c;
      const Slot logits = c.array(dtype, scaled(5, noise(rows * cols, 3)));
      const Slot targets = c.array(DType::kI64, some_targets(rows, cols));
      const Slot loss = c.empty(stat_dtype(dtype), rows);
      const Slot total =
          wants_total ? c.empty(stat_dtype(dtype), rows) : c.null();
      c.expect_equal(kernels::cross_entropy, 10 * tolerance(stat_dtype(dtype)),
                     dtype, rows, cols, logits, targets, loss, total);
    }
  }
}

TEST_P(SoftmaxParity, CrossEntropyBackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kSoftmaxRows) {
    for (const bool mean : {true, false}) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      Comparison c;
      const Slot logits = c.array(dtype, scaled(2, noise(rows * cols, 3)));
      const Slot targets = c.array(DType::kI64, some_targets(rows, cols));
      const Slot total =
          c.array(stat_dtype(dtype), std::vector<double>(rows, 1.5));
      const Slot dloss = c.array(stat_dtype(dtype), {0.125});
      const Slot grad = mean ? c.empty(dtype, rows * cols) : logits;
      c.expect_equal(kernels::cross_entropy_backward, 2 * tolerance(dtype),
                     dtype, rows, cols, logits, targets, total, dloss, mean,
                     grad);
    }
  }
}

// Arrays whose rows meet whole vectors at different elements, and both at
// others than the arrays' first.
TEST_P(SoftmaxParity, ArraysMayBeginAnywhere) {
  const std::int64_t rows = 3, cols = 1501;
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (const auto& [from, to] : {SoftmaxRows{1, 0}, {1, 1}, {0, 3}}) {
    Comparison c;
    const Slot logits = c.array(dtype, noise(rows * cols + from, 3));
    const Slot targets = c.array(DType::kI64, some_targets(rows, cols));
    const Slot loss = c.empty(stat_dtype(dtype), rows);
    const Slot total = c.empty(stat_dtype(dtype), rows);
    const Slot dloss = c.array(stat_dtype(dtype), {0.125});
    const Slot grad = c.array(dtype, noise(rows * cols + to, 4));
    const auto both = [&, from = from, to = to](
                          KernelContext& context, const char* x,
                          const std::int64_t* t, void* l, void* sum,
                          const void* d, char* dx) {
      kernels::cross_entropy(context, dtype, rows, cols, x + from * bytes, t, l,
                             sum);
      kernels::cross_entropy_backward(context, dtype, rows, cols,
                                      x + from * bytes, t, sum, d, true,
                                      dx + to * bytes);
      kernels::softmax_backward(context, dtype, rows, cols, x + from * bytes,
                                dx + to * bytes, dx + to * bytes);
    };
    c.expect_equal(both, 10 * tolerance(dtype), logits, targets, loss, total,
                   dloss, grad);
  }
}

TEST_P(SoftmaxParity, ReducedLossesEqualTheCpus) {
  const DType stat = stat_dtype(dtype);
  for (const std::int64_t rows : {0, 1, 31, 33, 1024, 5001}) {
    for (const bool mean : {true, false}) {
      Comparison c;
      const Slot losses = c.array(stat, noise(rows, 1));
      const Slot targets = c.array(DType::kI64, some_targets(rows, 4));
      const Slot loss = c.empty(stat, 1);
      c.expect_equal(kernels::reduce_losses, 10 * tolerance(stat), stat, rows,
                     losses, targets, mean, loss);
    }
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(SoftmaxParity);

/// The next result that the host reads comes with the error.
void expect_error_about(CudaContext& context, const DeviceArray& loss,
                        std::int64_t target) {
  try {
    kernels::sum_all(context.kernels(), DType::kF32, 2, loss.data());
    ADD_FAILURE() << "no error for target " << target;
  } catch (const Error& error) {
    EXPECT_NE(
        std::string(error.what()).find("target " + std::to_string(target)),
        std::string::npos)
        << error.what();
  }
}

TEST(CrossEntropyParityErrors, TargetsOutsideTheClasses) {
  for (const std::int64_t bad : {2, -1, -101}) {
    CudaContext context;
    const std::int64_t values[2] = {0, bad};
    const float one = 1;
    DeviceArray logits(4 * sizeof(float)), targets(sizeof(values));
    DeviceArray loss(2 * sizeof(float)), dloss(sizeof(float));
    const float zeros[4] = {};
    logits.write(context, zeros);
    targets.write(context, values);
    dloss.write(context, &one);
    const auto* const t = static_cast<const std::int64_t*>(targets.data());
    kernels::cross_entropy(context.kernels(), DType::kF32, 2, 2, logits.data(),
                           t, loss.data(), nullptr);
    expect_error_about(context, loss, bad);
    kernels::cross_entropy_backward(context.kernels(), DType::kF32, 2, 2,
                                    logits.data(), t, loss.data(), dloss.data(),
                                    true, logits.data());
    expect_error_about(context, loss, bad);
  }
}

}  // namespace
}  // namespace shardbook::parity
