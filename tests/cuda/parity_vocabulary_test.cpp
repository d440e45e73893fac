// The loss of a vocabulary that is cut over ranks: CUDA against the CPU.

#include <utility>
#include <vector>

#include "core/kernels/vocabulary.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::tolerance;
using kernels::VocabularyPart;

class VocabularyParity : public ParityTest {};

/// Rows, columns, first class, classes that exist: none, one, all, with padding;
/// a warp's row and a block's; an empty batch.
const std::vector<VocabularyPart> kParts = {{3, 5, 0, 5},
                                            {1, 1, 7, 1},
                                            {4, 33, 33, 30},
                                            {2, 16, 48, 0},
                                            {5, 1024, 0, 999},
                                            {3, 1031, 1031, 1031},
                                            {2, 12672, 38016, 12241},
                                            {0, 8, 0, 8}};

std::vector<double> targets_around(const VocabularyPart& part) {
  // Before, inside and behind this rank's classes, and one that is ignored
  std::vector<double> targets;
  for (std::int64_t r = 0; r < part.rows; ++r) {
    const std::int64_t inside =
        part.first + (part.valid > 0 ? r % part.valid : 0);
    targets.push_back(static_cast<double>(r % 4 == 1 ? kernels::kIgnoreIndex
                                          : r % 4 == 2
                                              ? part.first + part.cols + 3
                                              : inside));
  }
  return targets;
}

TEST_P(VocabularyParity, EveryPieceEqualsTheCpus) {
  for (const VocabularyPart& part : kParts) {
    const auto values = scaled(3, noise(part.rows * part.cols, 3));
    const std::vector<double> largest(static_cast<std::size_t>(part.rows), 3.5);
    Comparison of_max(dtype), of_sums(dtype);
    of_max.expect_equal(kernels::vocabulary_max, tolerance(stat), dtype, part,
                        of_max.array(values), of_max.empty(stat, part.rows));
    of_sums.expect_equal(
        kernels::vocabulary_sums, 10 * tolerance(stat), dtype, part,
        of_sums.array(values), of_sums.array(DType::kI64, targets_around(part)),
        of_sums.array(stat, largest), of_sums.empty(stat, part.rows),
        of_sums.empty(stat, part.rows));
    for (const bool mean : {true, false}) {
      Comparison c(dtype);
      const Slot logits = c.array(values);
      const Slot out = mean ? c.empty(part.rows * part.cols) : logits;
      c.expect_equal(kernels::vocabulary_gradient, 2 * tolerance(dtype), dtype,
                     part, logits, c.array(DType::kI64, targets_around(part)),
                     c.array(stat, largest), c.array(stat, {0.125}), mean, out);
    }
  }
}

TEST_P(VocabularyParity, LossesEqualTheCpus) {
  for (const std::int64_t rows : {0, 1, 33, 5001}) {
    Comparison c(dtype);
    const VocabularyPart part{rows, 9, 9, 9};
    const Slot max = c.noise(rows, 1);
    c.expect_equal(
        kernels::vocabulary_losses, 10 * tolerance(dtype), dtype, rows,
        c.array(DType::kI64, targets_around(part)), c.noise(rows, 2), max,
        c.array(std::vector<double>(static_cast<std::size_t>(rows), 17.25)),
        c.empty(rows), max);
  }
}

SB_OVER_FLOATING_DTYPES(VocabularyParity);

}  // namespace
}  // namespace shardbook::parity
