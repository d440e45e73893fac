// ZeRO: every option has its documented effect, and no other.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

// --- Clipping and overflow --------------------------------------------------

// The norm and clipping ignore the loss scale; a gradient within the limit is not
// clipped.
TEST(ZeroOptions, NormAndLimitAreThoseOfTheUnscaledGradient) {
  Training run = optimizers(DType::kF32)[0];
  run.steps = 1;
  for (const int number : {1, 2, 3}) {
    for (const auto& [plain_clip, clip] :
         {std::pair(0.0, 0.0), {0.05, 0.05}, {0.0, 1e6}}) {
      ZeroOptions options = stage(number);
      options.clip = plain_clip;
      const State plain = train_zero(2, run, options)[0];
      options.clip = clip;
      options.loss_scale = 1024;  // a power of two: exact
      EXPECT_EQ(first_difference(train_zero(2, run, options)[0], plain), "")
          << "stage " << number << ", clip " << clip;
    }
  }
}

// Only f16 overflows where f32 would not. With more exponent bits, a gradient
// that is not finite comes from the model and must be visible.
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
  // 32, 4 | 64, 16 | 64, 4 elements over shards of 92: in order, rank 0 owns
  // the first two; round robin puts the second behind 160
  for (const int number : {1, 2}) {
    for (const bool robin : {false, true}) {
      const auto owns = on_ranks(2, [&](ProcessGroup& world) {
        Sequential model = make_184(DType::kF32);
        ZeroOptions options = stage(number);
        options.round_robin_gradients = robin;
        const auto zero = make_zero(model, world, options, "sgd", {});
        const auto parts = zero->state().parts;
        const auto owns = [&](const std::string& name) {
          return std::any_of(parts.begin(), parts.end(),
                             [&](auto& part) { return part.name == name; });
        };
        return std::pair(owns("0.weight"), owns("0.bias"));
      });
      EXPECT_EQ(owns[0], std::pair(true, !robin)) << "stage " << number;
      EXPECT_EQ(owns[1], std::pair(false, robin)) << "stage " << number;
    }
  }
}

// --- Loading ----------------------------------------------------------------

// Frozen parameters are loaded as well, even where they stay gathered.
TEST(ZeroOptions, FrozenParametersAreLoaded) {
  for (const std::int64_t threshold : {0, 7, 1000}) {
    std::vector<Tensors> saved(3);
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
        NoGrad no_grad;
        const TrainingState state = zero->state();
        Tensors& mine = saved[static_cast<std::size_t>(world.rank())];
        for (std::size_t i = 0; i < state.parts.size(); ++i) {
          const Tensor& values = state.parts[i].values;
          loads ? values.copy_from(mine[i]) : mine.push_back(values.clone());
        }
        if (loads) state.loaded({});
        return (*zero)(make_samples(4, DType::kF64).x).to_vector<double>();
      });
    };
    const auto expected = outputs(1, false);
    EXPECT_EQ(outputs(77, true), expected) << "threshold " << threshold;
  }
}

// --- Sums of micro-steps ------------------------------------------------------

/// Rank 0's part of the gradient after these of three micro-steps in bf16.
Values gradient_of(const ZeroOptions& options, const std::vector<int>& micros) {
  Training run;
  run.dtype = DType::kBF16;
  run.micro_steps = 3;
  return on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    const auto zero = make_zero(model, world, options, "sgd", {});
    for (const int micro : micros) {
      const Samples mine = samples_of(run, 0, micro, world);
      zero->set_boundary(micro == micros.back());
      backward_of((*zero)(mine.x), mine, run.micro_steps);
    }
    Values all;
    for (const NamedTensor& part : zero->own_gradients()) {
      const Values part_values = part.tensor.to_vector<double>();
      all.insert(all.end(), part_values.begin(), part_values.end());
    }
    return all;
  })[0];
}

struct CountOps : Observer {
  void on_op_begin(const OpEvent&) override { ++count; }
  int count = 0;
};

// Of one kind; of two kinds, which alternate; and of those that are not next to each
// other in memory.
TEST(ZeroOptions, NeighboursInAShardAreSquaredInOneOperation) {
  const auto is_bias = [](const std::string& name) {
    return name.ends_with(".bias");
  };
  for (const bool round_robin : {false, true}) {
    ZeroOptions options = stage(2);
    options.round_robin_gradients = round_robin;
    on_ranks(2, [&](ProcessGroup& world) {
      const Training run;
      Sequential model = make_mlp(run.dtype);
      const auto zero = make_zero(model, world, options, "sgd", {});
      const Samples mine = samples_of(run, 0, 0, world);
      backward_of((*zero)(mine.x), mine, 1);
      std::array<double, 2> expected = {0, 0};
      for (const NamedTensor& each : zero->own_gradients()) {
        expected[is_bias(each.name) ? 1 : 0] += sum_of_squares(each.tensor);
      }
      const auto sums = zero->sums_of_squares(is_bias);
      EXPECT_NEAR(sums[0], expected[0], 1e-12 * expected[0]);
      EXPECT_NEAR(sums[1], expected[1], 1e-12 * expected[1]);
      EXPECT_GT(expected[0], 0);
      const auto ops = std::make_shared<CountOps>();
      RankContext::current().add_observer(ops);
      const double all =
          zero->sums_of_squares([](const std::string&) { return false; })[0];
      RankContext::current().remove_observer(ops);
      EXPECT_NEAR(all, expected[0] + expected[1], 1e-12 * all);
      EXPECT_TRUE(round_robin || ops->count == 1) << ops->count;
      return 0;
    });
  }
}

// Each micro-step's sum over ranks is rounded to 16 bits, as it travels so; the
// sum over micro-steps is not.
TEST(ZeroOptions, ShardsInF32AddMicroStepsInF32) {
  for (const int number : {2, 3}) {
    for (const bool offload : {false, true}) {
      ZeroOptions options = stage(number);
      options.offload_optimizer = offload;
      const Values narrow = gradient_of(options, {0, 1, 2});
      const Values first = gradient_of(options, {0});
      const Values second = gradient_of(options, {1});
      const Values third = gradient_of(options, {2});
      options.accumulate_f32 = true;
      const Values wide = gradient_of(options, {0, 1, 2});
      Values expected;
      for (std::size_t i = 0; i < first.size(); ++i) {
        const auto two = static_cast<float>(first[i] + second[i]);
        expected.push_back(static_cast<float>(two + third[i]));
      }
      EXPECT_EQ(wide, expected) << "stage " << number;
      EXPECT_NE(narrow, expected) << "stage " << number;
    }
  }
}

// --- Offload ----------------------------------------------------------------

TEST(ZeroOptions, OffloadCountsTheBytesOfEveryDtype) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
    for (const auto& [number, parameters] :
         {std::pair(2, false), std::pair(3, false), std::pair(3, true)}) {
      const auto counted = on_ranks(2, [&](ProcessGroup& world) {
        Sequential model = make_184(dtype);
        ZeroOptions options = stage(number);
        options.offload_optimizer = true;
        options.offload_parameters = parameters;
        const auto zero = make_zero(model, world, options, "adam", {});
        const zero::HostTraffic before = zero->host_traffic();
        const Tensor x =
            Tensor::full({2, 8}, 1.0 + world.rank(), {dtype, Device()});
        for (int i = 0; i < 2; ++i) {
          zero->set_boundary(i == 1);
          sum((*zero)(x)).backward();
        }
        zero->step();
        EXPECT_NEAR(wire_bytes(world.records()), zero->predicted_bytes(1, 2),
                    1e-6);
        const zero::HostTraffic after = zero->host_traffic();
        return std::pair(after.to_host - before.to_host,
                         after.to_device - before.to_device);
      });
      // Each micro-step sends this rank's half of the gradients. Parameters
      // return after the step, or at each of four gathers.
      const auto half = static_cast<std::int64_t>(92 * dtype_bytes(dtype));
      for (const auto& rank : counted) {
        EXPECT_EQ(rank.first, 2 * half) << dtype_name(dtype) << " " << number;
        EXPECT_EQ(rank.second, (parameters ? 4 : 1) * half)
            << dtype_name(dtype) << " " << number;
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::zero_test
