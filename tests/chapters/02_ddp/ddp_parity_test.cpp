// DDP against one device: the numbers, and what is identical bit for bit.

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/02_ddp/sync_batch_norm.h"
#include "tests/chapters/02_ddp/ddp_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::ddp_test {
namespace {

using ddp::DdpOptions;
using ddp::DistributedDataParallel;

/// A way to configure DDP; all ways compute the same.
struct Variant {
  const char* name;
  DdpOptions options;
};

std::vector<Variant> variants() {
  // Several buckets, also after the rebuild
  const double cap = 150 * kByte, first = 30 * kByte;
  return {{"one bucket", {}},
          {"tiny buckets", {.bucket_cap_mb = cap, .first_bucket_mb = first}},
          {"views",
           {.bucket_cap_mb = cap,
            .first_bucket_mb = first,
            .gradient_as_bucket_view = true}},
          {"find unused",
           {.bucket_cap_mb = cap,
            .first_bucket_mb = first,
            .find_unused_parameters = true}},
          {"static graph",
           {.bucket_cap_mb = cap,
            .first_bucket_mb = first,
            .gradient_as_bucket_view = true,
            .static_graph = true}}};
}

class DdpParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, DdpParity,
                         testing::ValuesIn(world_sizes()));

struct Updates {
  const char* optimizer;
  OptimizerOptions options;
};

/// The state after four steps of gradients that `backward` computes.
Values state_after(
    Module& model, DType dtype, const Updates& updates,
    const std::function<void(const Samples& global_batch)>& backward) {
  const auto optimizer =
      make_optimizer(updates.optimizer, model.parameters(), updates.options);
  for (std::uint64_t step = 0; step < 4; ++step) {
    backward(make_samples(24, dtype, 10 + step));
    optimizer->step();
    model.clear_grad();
  }
  return state_of(model, *optimizer);
}

std::vector<Values> train_ddp(int d, DType dtype, const Updates& updates,
                              const DdpOptions& options) {
  return on_ranks(d, [&](ProcessGroup& world) {
    // Different weights on each rank: construction makes them rank 0's
    Sequential model =
        make_mlp(dtype, 1 + static_cast<std::uint64_t>(world.rank()));
    DistributedDataParallel ddp(model, world, options);
    return state_after(model, dtype, updates, [&](const Samples& all) {
      const Samples mine = every(all, world.rank(), d);
      mse_loss(ddp(mine.x), mine.y).backward();
    });
  });
}

/// The same on one device: `chunks` chunks, one after another.
Values train_chunks(int chunks, DType dtype, const Updates& updates) {
  RankContext context(Device::cpu(), 0, 1);
  context.deterministic = true;
  RankContext::Scope scope(context);
  Sequential model = make_mlp(dtype);
  return state_after(model, dtype, updates, [&](const Samples& all) {
    chunk_gradients(model, all, chunks, mse);
  });
}

const Updates kUpdates[] = {
    {"adamw", {}},
    {"sgd", {.lr = 0.05, .weight_decay = 0.01, .momentum = 0.9}}};

// [BIT] parameters and optimizer state, on all ranks, in every configuration.
TEST_P(DdpParity, EqualsTheChunksOneAfterAnotherBitForBit) {
  const int d = GetParam();
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const Updates& updates : kUpdates) {
      const Values chunks = train_chunks(d, dtype, updates);
      for (const Variant& variant : variants()) {
        for (const Values& rank :
             train_ddp(d, dtype, updates, variant.options)) {
          EXPECT_EQ(rank, chunks) << variant.name << " " << dtype_name(dtype)
                                  << " " << updates.optimizer;
        }
      }
    }
  }
}

// --- Uneven counts -----------------------------------------------------------

// Rank 0 has 5 of 8 samples, rank 1 has 3.
Samples uneven_samples(int rank) {
  const Samples all = make_samples(8, DType::kF64);
  const std::int64_t begin = rank == 0 ? 0 : 5, end = rank == 0 ? 5 : 8;
  return {slice(all.x, 0, begin, end), slice(all.y, 0, begin, end)};
}

std::vector<Values> uneven_gradients(bool by_sum) {
  return on_ranks(2, [by_sum](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world);
    const Samples mine = uneven_samples(world.rank());
    Tensor loss = mse_loss(ddp(mine.x), mine.y);
    if (by_sum) {
      // Sum the numerators, divide by the global count; undo DDP's 1/d
      const Tensor count = Tensor::full({}, static_cast<double>(mine.x.size(0)),
                                        {DType::kF64, Device()});
      const double local = count.item();
      world.all_reduce(count).wait();
      loss = scale(loss, local * world.size() / count.item());
    }
    loss.backward();
    return grads_of(model);
  });
}

TEST(DdpTrap, TheMeanOfLocalMeansIsNotTheMeanWhenCountsDiffer) {
  const Values right = one_device_grads<Mlp>(8);
  EXPECT_GT(largest_difference(uneven_gradients(false)[0], right), 1e-3);
  const auto remedied = uneven_gradients(true);
  EXPECT_LT(largest_difference(remedied[0], right), 1e-12);
  EXPECT_EQ(remedied[0], remedied[1]);
}

// --- Batch normalisation -----------------------------------------------------

Sequential make_norm_net() {
  Sequential model;
  const InitOptions init = init_of(DType::kF64);
  model.add(Linear("0", 5, 6, init));
  model.add(BatchNorm(6, init));
  model.add(Relu());
  model.add(Linear("3", 6, 3, init));
  return model;
}

TEST(DdpSyncBatchNorm, SendsCountsAndSumsForwardAndTwoSumsBackward) {
  const auto logs = on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_norm_net();
    EXPECT_EQ(ddp::convert_sync_batchnorm(model, world), 1);
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    mse(model, mine).backward();
    return numels(records_of(world, CommOp::kAllReduce, "statistics"));
  });
  EXPECT_EQ(logs[0], (std::vector<std::int64_t>{6 + 1, 6, 2 * 6}));
  EXPECT_EQ(logs[0], logs[1]);
}

TEST(DdpSyncBatchNorm, RanksWithDifferentCountsAreWeightedByThem) {
  // The statistics cover all 8.
  const auto stats = on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_norm_net();
    ddp::convert_sync_batchnorm(model, world);
    NoGrad no_grad;
    model(uneven_samples(world.rank()).x);
    return values_of(model.buffers());
  });
  Sequential model = make_norm_net();
  NoGrad no_grad;
  model(make_samples(8, DType::kF64).x);
  EXPECT_LT(largest_difference(stats[0], values_of(model.buffers())), 1e-12);
  EXPECT_EQ(stats[0], stats[1]);
}

// --- The language models, as the program trains them -------------------------

Report train_language(int d, Options options,
                      const ddp::StrategyOptions& setup) {
  options.world_size = d;
  return sharded_test::report_of<ddp::DdpStrategy>(options, setup);
}

TEST_P(DdpParity, ATiedGptEqualsOneDeviceAlsoWithDropout) {
  const int d = GetParam();
  Options options = tiny_options(kTinyGpt, DType::kF64);
  for (const double dropout : {0.0, 0.1}) {
    options.dropout = dropout;
    for (const std::int64_t accumulate : {1, d == 3 ? 4 : 3}) {
      sharded_test::expect_claims(
          train_language(d, options, {.micro_batches = accumulate}),
          "dropout " + std::to_string(dropout) + ", accumulate " +
              std::to_string(accumulate));
    }
  }
}

TEST(DdpParityOfOne, WorldSizeOneEqualsTheSingleDeviceBitForBit) {
  for (const DType dtype :
       sized<DType>({DType::kF32, DType::kF64, DType::kBF16}, {DType::kF32})) {
    for (const char* model : {kTinyGpt, "mlp"}) {
      for (const bool view : {false, true}) {
        const Report report =
            train_language(1, tiny_options(model, dtype),
                           {.ddp = {.gradient_as_bucket_view = view}});
        EXPECT_TRUE(report.parity.checked);
        EXPECT_EQ(report.parity.max_abs, 0) << dtype_name(dtype) << model;
      }
    }
  }
}

// --- The bill ----------------------------------------------------------------

TEST_P(DdpParity, BytesAndMemoryAreAsPredicted) {
  const int d = GetParam();
  const std::vector<ddp::StrategyOptions> all = {
      {},
      {.ddp = {.gradient_as_bucket_view = true}},
      {.ddp = {.find_unused_parameters = true}},
      {.ddp = {.gradient_as_bucket_view = true, .static_graph = true}},
      {.micro_batches = d == 3 ? 4 : 3},
      {.comm_hook = "bf16"},
      {.ddp = {.bucket_cap_mb = 0.005, .first_bucket_mb = 0.005}}};
  for (const char* model : {kTinyGpt, "mlp"}) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE("configuration " + std::to_string(i) + ", " + model);
      Options options = tiny_options(model);
      options.check = false;
      sharded_test::expect_bill(train_language(d, options, all[i]));
    }
  }
}

// Buckets are as large as the gradients; the order of the buckets adds an i32
// for each of the mlp's seven parameters. Where gradients lie in the buckets,
// the peak is the buffer in which the weights were sent at the beginning.
TEST(DdpBill, BucketsAreTheGradientsOnceMore) {
  const Options options = tiny_options("mlp");
  const double numbers = 4 * 64 * 256 + 256 + 64 + 256;
  for (const bool view : {false, true}) {
    const ddp::StrategyOptions setup{.ddp = {.gradient_as_bucket_view = view}};
    for (const RankReport& rank : train_language(2, options, setup).ranks) {
      const auto kind = static_cast<std::size_t>(MemoryKind::kCommunication);
      EXPECT_EQ(rank.peak[kind].counted, 4 * numbers + (view ? 0 : 7 * 4));
    }
  }
}

TEST(DdpBill, ABatchThatDoesNotDivideIsRefused) {
  Options options = tiny_options("mlp");
  options.batch = 25;
  const auto error = [&](const ddp::StrategyOptions& setup) {
    return error_on_ranks(4, [&](ProcessGroup& world) {
      ddp::DdpStrategy strategy(options, setup, world);
    });
  };
  expect_text(error({}), {"--batch 25: does not divide by --world-size 4"});
  options.batch = 24;
  expect_text(error({.micro_batches = 4}),
              {"--micro-batches 4: a rank's 6 samples"});
}

}  // namespace
}  // namespace shardbook::ddp_test
