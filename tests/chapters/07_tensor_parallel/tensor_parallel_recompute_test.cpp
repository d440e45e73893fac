// Recomputation that keeps 1/t of a block's input: the same numbers, one more
// message for each block, and less memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/recompute.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "core/autograd.h"
#include "core/ops.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/errors.h"
#include "tests/support/larger.h"
#include "tests/support/on_ranks.h"

namespace shardbook::tensor_parallel {
namespace {

using sharded_test::activation_peak;
using sharded_test::expect_claims;
using sharded_test::report_of;
using sharded_test::small_gpt;

StrategyOptions distributed() {
  return {.recompute = true, .distribute_saved_activations = true};
}

class DistributedInputs : public ::testing::TestWithParam<int> {};

TEST_P(DistributedInputs, EveryClaimHolds) {
  StrategyOptions setup = distributed();
  expect_claims(report_of<TensorParallelStrategy>(small_gpt(GetParam()), setup),
                "f64");
  Options options = small_gpt(GetParam(), DType::kF32);
  options.dropout = 0.2;
  setup.micro_batches = 2;
  expect_claims(report_of<TensorParallelStrategy>(options, setup),
                "dropout, micro-batches");
  options.check = false;
  setup.rng = "megatron";
  report_of<TensorParallelStrategy>(options, setup);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DistributedInputs,
                         ::testing::Values(1, 2, 3, 4, 8));

// With many blocks, nearly all kept memory is the blocks' inputs.
TEST(DistributedInputs, TheyCostOneAllGatherPerBlockAndSaveMemory) {
  for (const int t : {2, 4, 8}) {
    for (const double dropout : {0.0, 0.1}) {
      Options options = small_gpt(t, DType::kBF16);
      options.model =
          R"({"model_type":"gpt2","vocab_size":24,"n_positions":64,)"
          R"("n_embd":96,"n_layer":16,"n_head":24})";
      options.backend = "sim";
      options.cluster = "dgx-a100";
      options.seq = 64;
      options.dropout = dropout;
      StrategyOptions setup = distributed();
      const Report report = report_of<TensorParallelStrategy>(options, setup);
      sharded_test::expect_bill(report);
      const RankReport& parts = report.ranks[0];
      setup.distribute_saved_activations = false;
      const RankReport whole =
          report_of<TensorParallelStrategy>(options, setup).ranks[0];
      // 15 of 16 inputs are parts at the peak, which is in the last block
      const double x = 8 * 64 * 96 * 2, share = (t - 1.0) / t;
      EXPECT_DOUBLE_EQ(activation_peak(whole) - activation_peak(parts),
                       15 * x * share);
      EXPECT_DOUBLE_EQ(parts.bytes.counted - whole.bytes.counted,
                       static_cast<double>(options.steps) * 16 * x * share);
    }
  }
}

// Several forwards before the first backward, as in a pipeline.
TEST(DistributedInputs, SeveralMayBeKeptAtOnce) {
  const auto differences = on_ranks(3, [](ProcessGroup& tp) {
    RngTracker rng;
    const RecomputeOptions setup{.rng = &rng, .distribute_over = &tp};
    const auto square_of = [](const Tensor& x) { return mul(x, x); };
    Tensors leaves, results;
    for (int i = 0; i < 3; ++i) {
      leaves.push_back(Tensor::full({4, 3}, i + 1, {DType::kF64, Device()})
                           .set_requires_grad());
      // Not the leaf itself: its array is freed
      const Tensor x = scale(leaves.back(), 2);
      DroppedForward forward(x, setup);
      const Tensor y = square_of(x);
      results.push_back(forward.finish(y, square_of));
    }
    double largest = 0;
    for (const std::size_t i : {1, 0, 2}) {
      sum(results[i]).backward();
      // d/dx of (2 x)^2
      const Tensor expected = Tensor::full(
          {4, 3}, 8.0 * static_cast<double>(i + 1), {DType::kF64, Device()});
      largest = larger(largest, max_abs_difference(leaves[i].grad(), expected));
    }
    return largest;
  });
  for (const double each : differences) EXPECT_EQ(each, 0);
}

TEST(DistributedInputs, AreRefusedWithoutRecomputation) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& tp) {
    TensorParallelStrategy strategy(small_gpt(2),
                                    {.distribute_saved_activations = true}, tp);
  });
  expect_text(error, {"kept with --recompute only; give that as well"});
}

}  // namespace
}  // namespace shardbook::tensor_parallel
