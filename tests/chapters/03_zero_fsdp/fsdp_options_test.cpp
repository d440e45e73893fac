// FSDP: every option has its documented effect, and no other.

#include <gtest/gtest.h>

#include <cmath>

#include "tests/chapters/03_zero_fsdp/fsdp_support.h"

namespace shardbook::fsdp_test {
namespace {

// --- The values that training begins with -----------------------------------

/// Two layers and a batch norm, all filled with one value.
Sequential filled_model(double value) {
  Sequential model = make_mlp(DType::kF32);
  model.add(BatchNorm(3, init_of(DType::kF32)));
  for (const Tensor& tensor : model.parameters()) tensor.fill(value);
  for (const Tensor& tensor : model.buffers()) tensor.fill(value);
  return model;
}

TEST(FsdpOptions, SyncModuleStatesBeginsWithRankZerosValues) {
  for (const bool rows : {false, true}) {
    for (const bool sync : {false, true}) {
      on_ranks(3, [&](ProcessGroup& world) {
        Sequential model = filled_model(1 + world.rank());
        FullyShardedDataParallel fsdp(
            model, world, {.sync_module_states = sync, .per_parameter = rows});
        const Values whole = whole_parameters(fsdp);
        const Values buffers = values_of(model.buffers());
        const double own = 1 + world.rank();
        EXPECT_EQ(whole == Values(whole.size(), 1), sync);
        EXPECT_EQ(buffers, Values(buffers.size(), sync ? 1 : own));
      });
    }
  }
}

// --- Padding ----------------------------------------------------------------

// 41 elements over 8 ranks: the last shard is mostly padding, and leftovers in
// freed memory must not enter the gradient.
TEST(FsdpPadding, GarbageInFreedMemoryIsNotCounted) {
  const auto norms = on_ranks(8, [](ProcessGroup& world) {
    Linear model("0", 1, 41, init_of(DType::kF64), /*with_bias=*/false);
    FullyShardedDataParallel fsdp(model, world);
    const Tensor loss =
        sum(fsdp(Tensor::full({1, 1}, 1, {DType::kF64, Device()})));
    Tensors spoilt;
    for (int i = 0; i < 40; ++i) {
      spoilt.push_back(Tensor::full({48}, 1e9, loss.options()));
    }
    spoilt.clear();
    loss.backward();
    return fsdp.clip_grad_norm_(1e12);
  });
  for (const double norm : norms) EXPECT_NEAR(norm, std::sqrt(41.0), 1e-12);
}

// --- Hybrid sharding --------------------------------------------------------

FsdpOptions hybrid(int shard_size) {
  return {.sharding_strategy = ShardingStrategy::kHybridShard,
          .shard_size = shard_size};
}

// The ranks of a node are neighbours and hold one copy together.
TEST(FsdpHybrid, ConsecutiveRanksShareACopy) {
  for (const auto& [d, f] :
       std::vector<std::pair<int, int>>{{4, 2}, {6, 3}, {6, 2}}) {
    on_ranks(d, [f = f](ProcessGroup& world) {
      const int rank = world.rank();
      Linear model("0", 6, 4, init_of(DType::kF64), /*with_bias=*/false);
      model.weight.fill(rank);
      FullyShardedDataParallel fsdp(model, world, hybrid(f));
      const Values whole = whole_parameters(fsdp);
      Values want;
      for (int i = 0; i < 24; ++i) want.push_back(rank / f * f + i / (24 / f));
      EXPECT_EQ(whole, want) << "rank " << rank << ", nodes of " << f;

      world.clear_records();
      sum(fsdp(Tensor::full({1, 6}, 1, {DType::kF64, Device()}))).backward();
      for (const CommRecord& record : world.records()) {
        const bool among_replicas = record.op == CommOp::kAllReduce;
        EXPECT_EQ(record.group_rank, among_replicas ? rank / f : rank % f);
        EXPECT_EQ(record.group_size, among_replicas ? world.size() / f : f);
      }
    });
  }
}

// The mean is over all ranks, in any dtype on the wire. 1, 2, 3 and 4 and their
// halves are exact in few bits.
TEST(FsdpHybrid, ReplicasAverageInEveryDtype) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool reduces_alone : {false, true}) {
      for (const int f : {1, 2, 4}) {
        on_ranks(4, [&](ProcessGroup& world) {
          Linear model("0", 1, 8, init_of(DType::kF32), /*with_bias=*/false);
          FsdpOptions options = hybrid(f);
          if (reduces_alone) {
            options.mixed_precision.reduce_dtype = dtype;
          } else {
            options.mixed_precision.param_dtype = dtype;
          }
          FullyShardedDataParallel fsdp(model, world, options);
          sum(fsdp(Tensor::full({1, 1}, 1.0 + world.rank()))).backward();
          const Values grad = fsdp.parameters()[0].grad().to_vector<double>();
          EXPECT_EQ(grad, Values(static_cast<std::size_t>(8 / f), 2.5))
              << dtype_name(dtype) << ", nodes of " << f;
        });
      }
    }
  }
}

// --- Offload ----------------------------------------------------------------

TEST(FsdpOffload, CountsTheBytesOfEveryDtype) {
  struct Case {
    DType model;
    std::optional<DType> param, reduce;
    std::int64_t to_device, to_host;  // bytes per element
  };
  // Shards travel in their own dtype, gradients in the reduced one
  for (const Case& c :
       std::vector<Case>{{DType::kF64, {}, {}, 8, 8},
                         {DType::kF32, DType::kBF16, {}, 4, 2},
                         {DType::kF32, DType::kBF16, DType::kF32, 4, 4},
                         {DType::kBF16, {}, {}, 2, 2}}) {
    on_ranks(2, [&](ProcessGroup& world) {
      Linear model("0", 8, 4, init_of(c.model), /*with_bias=*/false);
      FsdpOptions options;
      options.cpu_offload.offload_params = true;
      options.mixed_precision.param_dtype = c.param;
      options.mixed_precision.reduce_dtype = c.reduce;
      FullyShardedDataParallel fsdp(model, world, options);
      sum(fsdp(Tensor::full({2, 8}, 1, {c.model, Device()}))).backward();
      // Half of 32 elements; the root is gathered once and reduced once
      EXPECT_EQ(fsdp.host_traffic().to_device, 16 * c.to_device);
      EXPECT_EQ(fsdp.host_traffic().to_host, 16 * c.to_host);
      const Tensor shard = fsdp.parameters()[0];
      EXPECT_EQ(shard.device(), RankContext::current().host());
      EXPECT_EQ(shard.grad().device(), RankContext::current().host());
    });
  }
}

}  // namespace
}  // namespace shardbook::fsdp_test
