#include "core/check.h"
#include "core/kernels/combine.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::ReduceKind;

// Inputs lie end to end in one array, outputs in another.
class CombineParity : public ParityTest {
 protected:
  void combine(KernelContext& context, ReduceKind op, std::int64_t n,
               int num_inputs, int num_outputs, const char* from,
               char* to) const {
    const std::int64_t bytes =
        n * static_cast<std::int64_t>(dtype_bytes(dtype));
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (int k = 0; k < num_inputs; ++k) inputs.push_back(from + k * bytes);
    for (int k = 0; k < num_outputs; ++k) outputs.push_back(to + k * bytes);
    kernels::combine(context, dtype, op, n, inputs, outputs);
  }

  std::vector<double> numbers(std::int64_t n, std::uint64_t seed) const {
    std::vector<double> values = noise(n, seed);
    for (double& x : values) x *= 1000;
    return values;
  }
};

TEST_P(CombineParity, IsBitEqualForAnyNumberOfArrays) {
  const auto run = [this](auto&&... args) { combine(args...); };
  for (const ReduceKind op :
       {ReduceKind::kSum, ReduceKind::kMax, ReduceKind::kMin}) {
    for (const auto& [inputs, outputs] : {std::pair<int, int>{1, 1},
                                          {2, 1},
                                          {3, 3},
                                          {16, 16},
                                          {17, 1},
                                          {2, 17},
                                          {40, 33}}) {
      for (const std::int64_t n : {0, 1, 7, 64, 1000}) {
        if (n > 100 && inputs > 17) continue;
        Comparison c;
        c.expect_equal(run, 0, op, n, inputs, outputs,
                       c.array(dtype, numbers(n * inputs, 1)),
                       c.empty(dtype, n * outputs));
      }
    }
  }
}

// all_reduce in place: every output is an input.
TEST_P(CombineParity, OutputsMayBeInputs) {
  for (const int ranks : {2, 5, 16, 18}) {
    for (const std::int64_t n : {1, 35, 256}) {
      const auto in_place = [&](KernelContext& context, char* arrays) {
        combine(context, ReduceKind::kSum, n, ranks, ranks, arrays, arrays);
      };
      Comparison c;
      c.expect_equal(in_place, 0, c.array(dtype, numbers(n * ranks, 2)));
    }
  }
}

SB_PARITY_OVER_ALL_DTYPES(CombineParity);

TEST(CombineParityErrors, SomeInputIsNeeded) {
  CudaContext context;
  EXPECT_THROW(kernels::combine(context.kernels(), DType::kF64,
                                ReduceKind::kSum, 1, {}, {}),
               Error);
}

}  // namespace
}  // namespace shardbook::parity
