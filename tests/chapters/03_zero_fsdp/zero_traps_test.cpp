// Natural mistakes with sharded state, each shown to give wrong results.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "core/inplace.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

using zero::flat_layout;
using zero::FlatLayout;

Tensor filled(std::int64_t numel, std::uint64_t stream,
              DType dtype = DType::kF64) {
  const Tensor x = Tensor::empty({numel}, {dtype, Device()});
  fill_normal(x, 5, stream, 0, 1);
  return x;
}

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

// Two reductions from one buffer: the second gradient overwrites the first
// while it is in flight. Rank 1 is late, so the order is certain.
TEST(ZeroTrap, OneBucketWithOverlapIsOverwrittenInFlight) {
  auto reduce_two = [](int num_buffers) {
    return on_ranks(2, [&](ProcessGroup& world) {
      const Tensor token = Tensor::zeros({1});
      Tensors buffers;
      for (int i = 0; i < num_buffers; ++i) buffers.push_back(filled(4, 0));
      auto fill = [&](int gradient) {
        const Tensor& buffer =
            buffers[static_cast<std::size_t>(gradient % num_buffers)];
        buffer.fill(10 * gradient + world.rank() + 1);
        return buffer;
      };
      Work first, second;
      if (world.rank() == 0) {
        first = world.all_reduce(fill(0));
        const Tensor next = fill(1);  // the first has not been waited for
        world.send(token, 1).wait();
        second = world.all_reduce(next);
      } else {
        world.recv(token, 0).wait();
        first = world.all_reduce(fill(0));
        // This rank is correct, yet the other's mistake reaches it
        first.wait();
        second = world.all_reduce(fill(1));
      }
      first.wait();
      second.wait();
      return buffers[0].to_vector<double>()[0];
    });
  };
  // Gradient 0 is 1 + 2
  EXPECT_EQ(reduce_two(2), (Values{3, 3}));
  EXPECT_NE(reduce_two(1)[0], 3);
  // Production, with a rank that is late
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

// Each rank that clips by the norm of its own shard clips by another factor.
TEST(ZeroTrap, ClippingByTheNormOfAShardIsNotClipping) {
  Training run = optimizers(DType::kF64)[0];
  run.clip = 0.05;
  run.steps = 1;
  const State ddp = train_ddp(4, run)[0];
  ZeroOptions options = stage(2);
  options.clip = run.clip;
  EXPECT_LT(largest_difference(train_zero(4, run, options)[0], ddp), 1e-12);

  const auto local = on_ranks(4, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    ddp::DistributedDataParallel ddp_model(model, world);
    const Samples mine = samples_of(run, 0, 0, world);
    mse_loss(ddp_model(mine.x), mine.y).backward();
    // The shard that this rank would own
    Tensors grads;
    for (const Tensor& parameter : model.parameters()) {
      grads.push_back(reshape(parameter.grad(), {-1}));
    }
    NoGrad no_grad;
    const Tensor flat = concat(grads, 0);
    const FlatLayout layout = flat_layout({flat.numel()}, 4, 1);
    const std::int64_t begin = world.rank() * layout.shard();
    const Tensor own =
        slice(flat, 0, begin, std::min(flat.numel(), begin + layout.shard()));
    return std::pair(std::sqrt(sum_of_squares(own)),
                     grad_norm(model.parameters()));
  });
  for (const auto& [shard_norm, norm] : local) EXPECT_LT(shard_norm, norm);
  EXPECT_NE(local[0].first, local[1].first);
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

// Gathered values are ordered by rank, then by parameter.
TEST(ZeroTrap, ReadingGatheredShardsByParameterMixesThemUp) {
  Sequential model = make_184(DType::kF64);
  const Values right = values_of(model.parameters());
  const auto ranks = on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_184(DType::kF64);
    const auto zero = make_zero(model, world, stage(3), "sgd", {});
    const Values shard = zero->optimizer().parameters()[0].to_vector<double>();
    Tensors whole;
    for (const NamedTensor& each : zero->full_parameters()) {
      whole.push_back(each.tensor);
    }
    return std::pair(shard, values_of(whole));
  });
  Values end_to_end = ranks[0].first;
  end_to_end.insert(end_to_end.end(), ranks[1].first.begin(),
                    ranks[1].first.end());
  EXPECT_EQ(end_to_end.size(), right.size());  // no error is visible
  EXPECT_NE(end_to_end, right);
  EXPECT_EQ(ranks[0].second, right);
  EXPECT_EQ(ranks[1].second, right);
}

// A shard is not a piece of the flattened model: on another number of ranks
// (or in another stage) its n-th element belongs to another parameter.
TEST(ZeroTrap, ShardsEndToEndAreNotTheStateOnOtherRanks) {
  auto raw_shards = [](int d, int number) {
    Values all;
    for (const auto& shard : on_ranks(d, [&](ProcessGroup& world) {
           Sequential model = make_184(DType::kF64);
           const auto zero = make_zero(model, world, stage(number), "sgd", {});
           return zero->optimizer().parameters()[0].to_vector<double>();
         })) {
      all.insert(all.end(), shard.begin(), shard.end());
    }
    return all;
  };
  const Values two = raw_shards(2, 3), four = raw_shards(4, 3);
  EXPECT_EQ(two.size(), four.size());  // 184: no error is visible
  EXPECT_NE(two, four);
  EXPECT_NE(raw_shards(3, 1).size(), raw_shards(3, 3).size());
}

// Stage 2 keeps no full gradient: unreduced gradients are lost.
TEST(ZeroTrap, KeepingTheOwnSliceUnreducedLosesTheOthersGradients) {
  Training run = optimizers(DType::kF64, 2)[0];
  run.steps = 1;
  const State right = train_ddp(2, run)[0];
  EXPECT_LT(largest_difference(train_zero(2, run, stage(2))[0], right), 1e-12);
  const auto lossy = on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    ddp::DistributedDataParallel ddp_model(model, world);
    const auto optimizer = make_optimizer(run.optimizer, model.parameters(),
                                          run.optimizer_options);
    for (int i = 0; i < 2; ++i) {
      const Samples mine = samples_of(run, 0, i, world);
      model.clear_grad();  // the first micro-step was never reduced
      backward_of(ddp_model(mine.x), mine, 2);
    }
    optimizer->step();
    return state_by_name(model, *optimizer);
  });
  EXPECT_GT(largest_difference(lossy[0], right), 1e-4);
}

}  // namespace
}  // namespace shardbook::zero_test
