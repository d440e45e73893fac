// Natural mistakes around sharded state, each shown to be one.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/inplace.h"
#include "tests/chapters/zero_support.h"

namespace shardbook::zero_test {
namespace {

using zero::flat_layout;
using zero::FlatLayout;
using zero::slice_layout;
using zero::SliceLayout;

Tensor filled(std::int64_t numel, std::uint64_t stream,
              DType dtype = DType::kF64) {
  const Tensor x = Tensor::empty({numel}, {dtype, Device()});
  fill_normal(x, 5, stream, 0, 1);
  return x;
}

// Padding that is not zeroed travels with the gradients and is counted.
TEST(ZeroTrap, GarbageInThePaddingSpoilsTheNorm) {
  const FlatLayout layout = flat_layout({32, 4, 64, 16, 64, 4}, 3, 2);
  auto norm_with = [&](double padding) {
    return on_ranks(3, [&](ProcessGroup& world) {
      const Tensor flat = filled(layout.padded, 1);
      flat.flat_view(layout.numel, {layout.padded - layout.numel})
          .fill(padding);
      const Tensor own =
          flat.flat_view(world.rank() * layout.shard(), {layout.shard()});
      world.reduce_scatter(own, flat).wait();
      const Tensor total =
          Tensor::full({}, sum_of_squares(own), {DType::kF64, Device()});
      world.all_reduce(total).wait();
      return std::sqrt(total.item());
    })[0];
  };
  const double right = 3 * std::sqrt(sum_of_squares(filled(184, 1)));
  EXPECT_NEAR(norm_with(0), right, 1e-12);
  EXPECT_GT(norm_with(100) - right, 1);
  EXPECT_FALSE(std::isfinite(norm_with(std::nan(""))));
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
        // This rank does it right, and the other's mistake reaches it
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
  // And the right way with two buckets, through many buckets
  Training run = optimizers(DType::kF32)[1];
  ZeroOptions options = stage(2);
  options.reduce_bucket_size = 8;
  options.overlap_comm = true;
  EXPECT_EQ(
      first_difference(train_zero(3, run, options)[0], train_ddp(3, run)[0]),
      "");
}

// LAMB scales each tensor's update by |w| / |update|. On slices each rank finds
// another ratio.
TEST(ZeroTrap, NormsOfSlicesAreNotNormsOfTensors) {
  auto trust_ratios = [](bool reduces_norms) {
    return on_ranks(4, [&](ProcessGroup& world) {
      const Tensor weight = filled(64, 1), update = filled(64, 2);
      const std::int64_t begin = 16 * world.rank();
      const Tensor norms = Tensor::from_values<double>(
          {sum_of_squares(weight.flat_view(begin, {16})),
           sum_of_squares(update.flat_view(begin, {16}))},
          {2});
      if (reduces_norms) world.all_reduce(norms).wait();
      const Values values = norms.to_vector<double>();
      return std::sqrt(values[0] / values[1]);
    });
  };
  const double right =
      std::sqrt(sum_of_squares(filled(64, 1)) / sum_of_squares(filled(64, 2)));
  for (const double ratio : trust_ratios(true))
    EXPECT_NEAR(ratio, right, 1e-12);
  double worst = 0;
  for (const double ratio : trust_ratios(false)) {
    worst = std::max(worst, std::abs(ratio - right));
  }
  EXPECT_GT(worst, 0.05);
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
TEST(ZeroTrap, DividingAfterTheSumOverflows) {
  auto mean = [](bool divides_first) {
    return on_ranks(4, [&](ProcessGroup& world) {
      const Tensor grad = Tensor::full({4}, 40000, {DType::kF16, Device()});
      if (divides_first) scale_into(grad, grad, 0.25);
      const Tensor own = Tensor::empty({1}, {DType::kF16, Device()});
      world.reduce_scatter(own, grad).wait();
      if (!divides_first) scale_into(own, own, 0.25);
      return own.item();
    })[0];
  };
  EXPECT_EQ(mean(true), 40000);
  EXPECT_TRUE(std::isinf(mean(false)));
}

// What is gathered is ordered by rank, then by parameter.
TEST(ZeroTrap, ReadingAGatheredBufferByParameterMixesThemUp) {
  const SliceLayout layout = slice_layout({6, 4}, 2);  // slices of 3 and 2
  const auto gathered = on_ranks(2, [&](ProcessGroup& world) {
    // Parameter 0 is 0..5, parameter 1 is 10..13
    const double r = world.rank();
    const Tensor shard = Tensor::from_values<double>(
        {3 * r, 3 * r + 1, 3 * r + 2, 10 + 2 * r, 11 + 2 * r}, {5});
    const Tensor all =
        Tensor::empty({2 * layout.shard}, {DType::kF64, Device()});
    world.all_gather(all, shard).wait();
    return all.to_vector<double>();
  })[0];
  EXPECT_NE(Values(gathered.begin(), gathered.begin() + 6),
            (Values{0, 1, 2, 3, 4, 5}));
  Values unpacked;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const auto begin =
        gathered.begin() + static_cast<std::ptrdiff_t>(rank) * layout.shard;
    unpacked.insert(unpacked.end(), begin, begin + 3);
  }
  EXPECT_EQ(unpacked, (Values{0, 1, 2, 3, 4, 5}));
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
  EXPECT_EQ(two.size(), four.size());  // 184: nothing seems to be wrong
  EXPECT_NE(two, four);
  EXPECT_NE(raw_shards(3, 1).size(), raw_shards(3, 3).size());
}

// Stage 2 keeps no full gradient: what a micro-step does not reduce is lost.
TEST(ZeroTrap, KeepingTheOwnSliceUnreducedLosesTheOthersGradients) {
  Training run = optimizers(DType::kF64, 2)[0];
  run.steps = 1;
  const State right = train_ddp(2, run)[0];
  EXPECT_LT(largest_difference(train_zero(2, run, stage(2))[0], right), 1e-12);
  const auto lossy = on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    ddp::DistributedDataParallel ddp_model(model, world);
    const auto optimizer =
        make_optimizer(run.optimizer, model.parameters(), run.how);
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

// Another loss per rank is averaged; without the division by d it would be the
// sum.
TEST(ZeroTrap, TheSumOverRanksIsNotTheMean) {
  const auto grads = on_ranks(4, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    const auto zero = make_zero(model, world, stage(1), "sgd", {1.0});
    const State before = named_state(zero->full_parameters(), {});
    sum((*zero)(Tensor::full({1, 5}, 1, {DType::kF64, Device()}))).backward();
    zero->step();
    const State after = named_state(zero->full_parameters(), {});
    // d loss / d bias is 1 on every rank, so the mean is 1 and the sum 4
    return before.at("4.bias")[0] - after.at("4.bias")[0];
  });
  for (const double grad : grads) EXPECT_NEAR(grad, 1, 1e-12);
}

}  // namespace
}  // namespace shardbook::zero_test
