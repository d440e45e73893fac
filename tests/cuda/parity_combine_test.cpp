#include "core/kernels/combine.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::ReduceKind;

class CombineParity : public ParityTest {
 protected:
  // Inputs lie end to end in one array, outputs in another.
  void check(ReduceKind op, std::int64_t n, int num_inputs, int num_outputs,
             bool in_place = false) const {
    Comparison c(dtype);
    const Slot from = c.array(scaled(1000, kernels::noise(n * num_inputs, 1)));
    const Slot to = in_place ? from : c.empty(n * num_outputs);
    c.expect_equal_in(0, [&](const auto& on) {
      std::vector<const void*> inputs;
      std::vector<void*> outputs;
      for (int k = 0; k < num_inputs; ++k)
        inputs.push_back(on.from(from, k * n));
      for (int k = 0; k < num_outputs; ++k)
        outputs.push_back(on.from(to, k * n));
      kernels::combine(on.context, dtype, op, n, inputs, outputs);
    });
  }
};

TEST_P(CombineParity, IsBitEqualForAnyNumberOfArrays) {
  const std::pair<int, int> arrays[] = {{1, 1},  {2, 1},  {3, 3},  {16, 16},
                                        {17, 1}, {2, 17}, {40, 33}};
  for (const ReduceKind op :
       {ReduceKind::kSum, ReduceKind::kMax, ReduceKind::kMin}) {
    for (const auto& [inputs, outputs] : arrays) {
      for (const std::int64_t n : {0, 1, 7, 64, 1000}) {
        if (n > 100 && inputs > 17) continue;
        check(op, n, inputs, outputs);
      }
    }
  }
}

// all_reduce in place: every output is an input.
TEST_P(CombineParity, OutputsMayBeInputs) {
  for (const int ranks : {2, 5, 16, 18}) {
    for (const std::int64_t n : {1, 35, 256}) {
      check(ReduceKind::kSum, n, ranks, ranks, /*in_place=*/true);
    }
  }
}

SB_OVER_ALL_DTYPES(CombineParity);

}  // namespace
}  // namespace shardbook::parity
