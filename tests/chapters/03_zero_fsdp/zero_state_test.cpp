// The training state by name: whole, and in shards.

#include <gtest/gtest.h>

#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

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
      Sequential one = make_mlp(DType::kF32);
      bool is_whole =
          parameters.empty() || zero::shapes_of(parameters) ==
                                    zero::shapes_of(one.named_parameters());
      for (const auto& [name, tensor] : parameters) {
        is_whole = is_whole && tensor.device() == RankContext::current().host();
      }
      return std::pair(parameters.size(), is_whole);
    });
    EXPECT_EQ(counts[0], std::pair(std::size_t{6}, true)) << "stage " << number;
    EXPECT_EQ(counts[1], std::pair(std::size_t{0}, true)) << "stage " << number;
  }
}

}  // namespace
}  // namespace shardbook::zero_test
