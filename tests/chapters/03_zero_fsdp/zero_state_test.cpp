// The training state by name: whole, and in shards.

#include <gtest/gtest.h>

#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

/// Trains on data that do not depend on the number of ranks: every rank sees
/// all samples, and the sum of two or four equal shares is exact.
void train_on_all(ZeroOptimizer& zero, const Training& run, int first,
                  int last) {
  for (int step = first; step < last; ++step) {
    const Samples all =
        make_samples(6, run.dtype, 30 + static_cast<std::uint64_t>(step));
    backward_of(zero(all.x), all, 1);
    zero.step();
  }
}

// Trap: without the optimizer's state, training continues differently.
TEST(ZeroStateTrap, ParametersAloneAreNotTheState) {
  Training run;
  run.dtype = DType::kF64;
  const auto states = on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    const auto zero =
        make_zero(model, world, stage(2), "adam", run.optimizer_options);
    train_on_all(*zero, run, 0, 2);
    const std::vector<NamedTensor> parameters = zero->full_parameters();
    train_on_all(*zero, run, 2, 4);

    Sequential again = make_mlp(run.dtype, 77);
    again.load_values(parameters);
    const auto fresh =
        make_zero(again, world, stage(2), "adam", run.optimizer_options);
    train_on_all(*fresh, run, 2, 4);
    return std::pair(state_of_zero(*zero), state_of_zero(*fresh));
  });
  EXPECT_GT(largest_difference(states[0].first, states[0].second), 1e-4);
}

TEST(ZeroState, ShardsWithoutPaddingAreTheModel) {
  for (int number = 1; number <= 3; ++number) {
    const auto ranks = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_184(DType::kF32);
      Sequential whole = make_184(DType::kF32);
      const auto zero = make_zero(model, world, stage(number), "adam", {});
      std::map<std::string, Tensor> by_name;
      for (const auto& [name, tensor] : whole.named_parameters()) {
        by_name[name] = tensor;
      }
      std::int64_t numel = 0;
      bool all_equal = true;
      for (const StatePart& part : zero->state().parts) {
        const Tensor& tensor = by_name.at(part.name);
        all_equal =
            all_equal && part.whole == tensor.shape() &&
            bitwise_equal(part.values,
                          tensor.flat_view(part.begin, part.values.shape()));
        numel += part.values.numel();
      }
      return std::pair(all_equal, numel);
    });
    std::int64_t total = 0;
    for (const auto& [all_equal, numel] : ranks) {
      EXPECT_TRUE(all_equal) << "stage " << number;
      total += numel;
    }
    EXPECT_EQ(total, 184);
  }
}

TEST(ZeroState, RankZeroAloneMayKeepTheWholeTensors) {
  for (int number = 1; number <= 3; ++number) {
    const auto counts = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF32);
      ZeroOptions options = stage(number);
      options.allgather_bucket_size = 10;  // many small gathers
      const auto zero = make_zero(model, world, options, "adam", {});
      train_zero(*zero, Training(), 0, 1);
      const auto parameters = zero->full_parameters(/*rank0_only=*/true);
      bool on_host = true;
      for (const auto& [name, tensor] : parameters) {
        on_host = on_host && tensor.device() == RankContext::current().host();
      }
      return std::pair(parameters.size(), on_host);
    });
    EXPECT_EQ(counts[0], std::pair(std::size_t{6}, true)) << "stage " << number;
    EXPECT_EQ(counts[1], std::pair(std::size_t{0}, true)) << "stage " << number;
  }
}

}  // namespace
}  // namespace shardbook::zero_test
