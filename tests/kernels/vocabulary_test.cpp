// The pieces of a cut vocabulary together are the cross-entropy of all of it.

#include "core/kernels/vocabulary.h"

#include <algorithm>
#include <vector>

#include "core/kernels/softmax.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

class Vocabulary : public KernelTest {};

TEST_P(Vocabulary, ThreeRanksMakeTheLossOfOneDevice) {
  // 21 classes in three parts of eight, of which the last has three of padding
  const std::int64_t rows = 5, classes = 21, own = 8;
  const DType stat = stat_dtype(dtype);
  const std::vector<std::int64_t> targets = {0, 20, kIgnoreIndex, 8, 15};
  const Array whole = array(noise(rows * classes, 3));
  const Values values = whole.as({rows, classes});
  std::vector<Array> parts;
  std::vector<VocabularyPart> shapes;
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const std::int64_t valid = std::min(own, classes - rank * own);
    shapes.push_back({rows, own, rank * own, valid});
    Values part = 1e3 * xt::ones<double>({rows, own});
    xt::view(part, xt::all(), xt::range(0, valid)) =
        xt::view(values, xt::all(), xt::range(rank * own, rank * own + valid));
    parts.push_back(array({part.begin(), part.end()}));
  }
  std::vector<double> max(rows, -1e30), sum(rows), picked(rows);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    Array here(stat, std::vector<double>(rows));
    vocabulary_max(context, dtype, shapes[rank], parts[rank].data(),
                   here.data());
    for (std::size_t r = 0; r < rows; ++r) {
      max[r] = std::max(max[r], here.values()[r]);
    }
  }
  const Array of_all(stat, max);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    Array mine(stat, std::vector<double>(rows)), total = mine;
    vocabulary_sums(context, dtype, shapes[rank], parts[rank].data(),
                    targets.data(), of_all.data(), mine.data(), total.data());
    for (std::size_t r = 0; r < rows; ++r) {
      picked[r] += mine.values()[r];
      sum[r] += total.values()[r];
    }
  }
  Array loss(stat, std::vector<double>(rows)), lse = loss, expected = loss,
                                               expected_lse = loss;
  vocabulary_losses(context, stat, rows, targets.data(),
                    Array(stat, picked).data(), of_all.data(),
                    Array(stat, sum).data(), loss.data(), lse.data());
  cross_entropy(context, dtype, rows, classes, whole.data(), targets.data(),
                expected.data(), expected_lse.data());
  expect_close(loss.values(), expected.values(), 4 * tolerance(stat));
  expect_close(lse.values(), expected_lse.values(), 4 * tolerance(stat));

  const Array dloss(stat, std::vector<double>{0.5});
  for (const bool mean : {true, false}) {
    Array gradient = whole;
    cross_entropy_backward(context, dtype, rows, classes, whole.data(),
                           targets.data(), lse.data(), dloss.data(), mean,
                           gradient.data());
    const Values of_one = gradient.as({rows, classes});
    for (std::size_t rank = 0; rank < 3; ++rank) {
      Array mine = parts[rank];
      vocabulary_gradient(context, dtype, shapes[rank], mine.data(),
                          targets.data(), lse.data(), dloss.data(), mean,
                          mine.data());
      const std::int64_t first = shapes[rank].first, valid = shapes[rank].valid;
      Values wanted = xt::zeros<double>({rows, own});
      xt::view(wanted, xt::all(), xt::range(0, valid)) =
          xt::view(of_one, xt::all(), xt::range(first, first + valid));
      expect_close(mine, wanted, tolerance(dtype));
    }
  }
}

SB_OVER_FLOATING_DTYPES(Vocabulary);

}  // namespace
}  // namespace shardbook::kernels
