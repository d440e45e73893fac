// ZeRO: every option does what it says, and nothing where it should not.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "chapters/03_zero_fsdp/zero/zero_checkpoint.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::zero_test {
namespace {

// --- Clipping and overflow --------------------------------------------------

TEST(ZeroOptions, AGradientWithinTheLimitIsNotClipped) {
  const Training run = optimizers(DType::kF32)[0];
  for (const int number : {1, 2, 3}) {
    ZeroOptions options = stage(number);
    const State plain = train_zero(2, run, options)[0];
    options.clip = 1e6;
    EXPECT_EQ(first_difference(train_zero(2, run, options)[0], plain), "")
        << "stage " << number;
  }
}

// The scale of the loss is no part of the norm, nor of what is clipped.
TEST(ZeroOptions, NormAndLimitAreThoseOfTheUnscaledGradient) {
  Training run = optimizers(DType::kF32)[0];
  run.steps = 1;
  for (const int number : {1, 2, 3}) {
    ZeroOptions options = stage(number);
    options.clip = 0.05;
    const State plain = train_zero(2, run, options)[0];
    options.loss_scale = 1024;  // a power of two: exact
    EXPECT_EQ(first_difference(train_zero(2, run, options)[0], plain), "")
        << "stage " << number;
  }
}

// Only f16 overflows where f32 would not. With more exponent bits a gradient
// that is not finite is the model's, and must show.
TEST(ZeroOptions, OnlyF16LeavesStepsOut) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int number : {1, 2, 3}) {
      const auto steps = on_ranks(2, [&](ProcessGroup& world) {
        Sequential model = make_mlp(dtype);
        const auto zero = make_zero(model, world, stage(number), "sgd", {});
        const Samples mine = every(make_samples(8, dtype), world.rank(), 2);
        const Tensor loss = mse_loss((*zero)(mine.x), mine.y);
        const double seed =
            world.rank() == 1 ? std::numeric_limits<double>::infinity() : 1;
        autograd::backward({loss}, {Tensor::full({}, seed, loss.options())});
        EXPECT_FALSE(std::isfinite(zero->step()));
        return std::pair(zero->num_skipped_steps(), zero->steps_done());
      });
      const bool skips = dtype == DType::kF16;
      for (const auto& rank : steps) {
        EXPECT_EQ(rank.first, skips ? 1 : 0)
            << dtype_name(dtype) << ", stage " << number;
        EXPECT_EQ(rank.second, skips ? 0 : 1);
      }
    }
  }
}

// --- Layout -----------------------------------------------------------------

TEST(ZeroOptions, AlignmentPadsTheShards) {
  for (const int number : {1, 2}) {
    for (const auto& [alignment, shard] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 62}, {2, 62}, {7, 63}, {64, 64}, {100, 100}}) {
      const auto numels = on_ranks(3, [&](ProcessGroup& world) {
        Sequential model = make_184(DType::kF32);
        ZeroOptions options = stage(number);
        options.alignment = alignment;
        return make_zero(model, world, options, "sgd", {})->shard_numel();
      });
      EXPECT_EQ(numels, std::vector<std::int64_t>(3, shard)) << alignment;
    }
  }
}

TEST(ZeroOptions, RoundRobinGivesNeighboursToDifferentOwners) {
  // 32, 4 | 64, 16 | 64, 4 elements over shards of 92: in order, the first two
  // belong to rank 0; every other one first, the second is behind 160
  for (const int number : {1, 2}) {
    for (const bool robin : {false, true}) {
      const auto owns = on_ranks(2, [&](ProcessGroup& world) {
        Sequential model = make_184(DType::kF32);
        ZeroOptions options = stage(number);
        options.round_robin_gradients = robin;
        const auto zero = make_zero(model, world, options, "sgd", {});
        return std::pair(zero->owns_part_of("0.weight", 0, 32),
                         zero->owns_part_of("0.bias", 0, 4));
      });
      EXPECT_EQ(owns[0], std::pair(true, !robin)) << "stage " << number;
      EXPECT_EQ(owns[1], std::pair(false, robin)) << "stage " << number;
    }
  }
}

// --- Loading ----------------------------------------------------------------

// What is frozen is loaded as well, also where it stays gathered.
TEST(ZeroOptions, FrozenParametersAreLoaded) {
  for (const std::int64_t threshold : {0, 7, 1000}) {
    const TempFolder folder;
    auto outputs = [&](std::uint64_t seed, bool loads) {
      return on_ranks(3, [&](ProcessGroup& world) {
        Sequential model = make_mlp(DType::kF64, seed);
        const Tensors parameters = model.parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          fill_normal(parameters[i], seed, i, 0, 1);
          parameters[i].set_requires_grad(i > 2);
        }
        ZeroOptions options = stage(3);
        options.persistence_threshold = threshold;
        const auto zero = make_zero(model, world, options, "adam", {});
        if (loads) {
          zero::load_sharded(*zero, folder.path());
        } else {
          zero::save_sharded(*zero, folder.path());
        }
        NoGrad no_grad;
        return (*zero)(make_samples(4, DType::kF64).x).to_vector<double>();
      });
    };
    const auto saved = outputs(1, false);
    EXPECT_EQ(outputs(77, true), saved) << "threshold " << threshold;
  }
}

// --- Offload ----------------------------------------------------------------

TEST(ZeroOptions, OffloadCountsTheBytesOfEveryDtype) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
    for (const int number : {2, 3}) {
      const auto counted = on_ranks(2, [&](ProcessGroup& world) {
        Sequential model = make_184(dtype);
        ZeroOptions options = stage(number);
        options.offload_optimizer = true;
        const auto zero = make_zero(model, world, options, "adam", {});
        const zero::HostTraffic before = zero->host_traffic();
        const Tensor x =
            Tensor::full({2, 8}, 1.0 + world.rank(), {dtype, Device()});
        sum((*zero)(x)).backward();
        zero->step();
        const zero::HostTraffic after = zero->host_traffic();
        const zero::HostTraffic was = zero->predicted_host_traffic(1, 1);
        EXPECT_EQ(after.to_host, was.to_host);
        EXPECT_EQ(after.to_device, was.to_device);
        return std::pair(after.to_host - before.to_host,
                         after.to_device - before.to_device);
      });
      // A step sends the own half of the gradients, and brings parameters back
      const auto half = static_cast<std::int64_t>(92 * dtype_bytes(dtype));
      for (const auto& rank : counted) {
        EXPECT_EQ(rank.first, half) << dtype_name(dtype) << " " << number;
        EXPECT_EQ(rank.second, half) << dtype_name(dtype) << " " << number;
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::zero_test
