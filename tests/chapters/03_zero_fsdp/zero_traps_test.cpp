// What garbage in padding, late ranks and a division after the sum would spoil.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

/// Leaves numbers in memory that later tensors reuse.
void spoil_free_memory() {
  Tensors spoilt;
  for (int i = 0; i < 40; ++i) {
    spoilt.push_back(
        Tensor::full({64 * (i % 4 + 1)}, 1e9, {DType::kF64, Device()}));
  }
}

// Padding travels with the gradients and is counted in the norm: it must be
// zero whatever the memory held.
TEST(ZeroTrap, GarbageInThePaddingSpoilsNoNorm) {
  Sequential one = make_184(DType::kF64);
  auto input = [](int rank) {
    return Tensor::full({2, 8}, 1 + rank, {DType::kF64, Device()});
  };
  for (int rank = 0; rank < 3; ++rank) {
    scale(sum(one(input(rank))), 1.0 / 3).backward();
  }
  const double right = grad_norm(one.parameters());
  for (const int number : {1, 2, 3}) {
    for (const std::int64_t bucket : {500'000'000, 50}) {
      const auto norms = on_ranks(3, [&](ProcessGroup& world) {
        Sequential model = make_184(DType::kF64);
        ZeroOptions options = stage(number);
        options.alignment = 50;  // 116 elements of padding
        options.reduce_bucket_size = bucket;
        const auto zero = make_zero(model, world, options, "sgd", {});
        const Tensor loss = sum((*zero)(input(world.rank())));
        spoil_free_memory();
        loss.backward();
        return zero->step();
      });
      for (const double norm : norms) {
        EXPECT_NEAR(norm, right, 1e-9) << "stage " << number;
      }
    }
  }
}

// A single buffer would be overwritten while a late rank has not yet joined its
// reduction.
TEST(ZeroTrap, ABucketIsNotOverwrittenInFlight) {
  Training run = optimizers(DType::kF32)[1];
  ZeroOptions options = stage(2);
  // Gradients of 3, 18, 6 | 42 | 7, 35: none is larger than a bucket, which
  // would be sent from its own place
  options.reduce_bucket_size = 45;
  options.overlap_comm = true;
  const auto late = on_ranks(3, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    for (const Tensor& weight : model.parameters()) {
      weight.add_accumulate_hook([&world](Tensor&) {
        if (world.rank() != 1) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      });
    }
    const auto zero =
        make_zero(model, world, options, run.optimizer, run.optimizer_options);
    train_zero(*zero, run, 0, run.steps);
    return state_of_zero(*zero);
  });
  EXPECT_EQ(first_difference(late[0], train_ddp(3, run)[0]), "");
}

// 40000 is a number in f16, four times 40000 is not.
TEST(ZeroTrap, DividingAfterTheSumWouldOverflow) {
  const TensorOptions f16{DType::kF16, Device()};
  EXPECT_TRUE(std::isinf(Tensor::full({1}, 4 * 40000.0, f16).item()));
  for (const int number : {1, 2, 3}) {
    for (const bool scatters : {true, false}) {
      const auto norms = on_ranks(4, [&](ProcessGroup& world) {
        Linear model("0", 1, 1, init_of(DType::kF16), /*with_bias=*/false);
        ZeroOptions options = stage(number);
        options.reduce_scatter = scatters;
        const auto zero = make_zero(model, world, options, "sgd", {});
        sum((*zero)(Tensor::full({1, 1}, 40000, f16))).backward();
        return zero->step();
      });
      EXPECT_EQ(norms, Values(4, 40000)) << "stage " << number;
    }
  }
}

}  // namespace
}  // namespace shardbook::zero_test
