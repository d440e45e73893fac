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

/// State after `steps` steps on each rank.
std::vector<Values> train_ddp(int d, DType dtype, const std::string& optimizer,
                              const OptimizerOptions& setup, int steps,
                              const DdpOptions& options) {
  return on_ranks(d, [&](ProcessGroup& world) {
    // Different weights on each rank: construction makes them rank 0's
    Sequential model =
        make_mlp(dtype, 1 + static_cast<std::uint64_t>(world.rank()));
    DistributedDataParallel ddp(model, world, options);
    const auto optim = make_optimizer(optimizer, model.parameters(), setup);
    for (int step = 0; step < steps; ++step) {
      const Samples mine =
          every(make_samples(24, dtype, 10 + static_cast<std::uint64_t>(step)),
                world.rank(), d);
      mse_loss(ddp(mine.x), mine.y).backward();
      optim->step();
      model.clear_grad();
    }
    return state_of(model, *optim);
  });
}

/// The same on one device: `chunks` chunks, one after another.
Values train_chunks(int chunks, DType dtype, const std::string& optimizer,
                    const OptimizerOptions& setup, int steps) {
  RankContext context(Device::cpu(), 0, 1);
  context.deterministic = true;
  RankContext::Scope scope(context);
  Sequential model = make_mlp(dtype);
  const auto optim = make_optimizer(optimizer, model.parameters(), setup);
  for (int step = 0; step < steps; ++step) {
    chunk_gradients(
        model, make_samples(24, dtype, 10 + static_cast<std::uint64_t>(step)),
        chunks, mse);
    optim->step();
    model.clear_grad();
  }
  return state_of(model, *optim);
}

OptimizerOptions sgd_options() {
  OptimizerOptions options;
  options.lr = 0.05;
  options.momentum = 0.9;
  options.weight_decay = 0.01;
  return options;
}

// [BIT] parameters and optimizer state, on all ranks, in every configuration.
TEST_P(DdpParity, EqualsTheChunksOneAfterAnotherBitForBit) {
  const int d = GetParam();
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const Values adamw = train_chunks(d, dtype, "adamw", {}, 4);
    const Values sgd = train_chunks(d, dtype, "sgd", sgd_options(), 4);
    for (const Variant& variant : variants()) {
      for (const Values& rank :
           train_ddp(d, dtype, "adamw", {}, 4, variant.options)) {
        EXPECT_EQ(rank, adamw) << variant.name << " " << dtype_name(dtype);
      }
      for (const Values& rank :
           train_ddp(d, dtype, "sgd", sgd_options(), 4, variant.options)) {
        EXPECT_EQ(rank, sgd) << variant.name << " " << dtype_name(dtype);
      }
    }
  }
}

// --- The traps, each of which must fail --------------------------------------

TEST(DdpTrap, WithoutTheDivisionTheGradientIsDTimesTooLarge) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world);
    ddp.register_comm_hook(
        [](const ddp::GradBucket& bucket, ProcessGroup& group) {
          group.all_reduce(bucket.gradients).wait();
          return [] {};
        });
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    mse_loss(ddp(mine.x), mine.y).backward();
    return grads_of(model);
  });
  Sequential model = make_mlp(DType::kF64);
  mse(model, make_samples(8, DType::kF64)).backward();
  Values right = grads_of(model);
  EXPECT_GT(largest_difference(grads[0], right), 1e-3);
  for (double& value : right) value *= 2;
  EXPECT_LT(largest_difference(grads[0], right), 1e-12);
}

// Rank 0 has 5 samples, rank 1 has 3.
std::vector<Values> uneven_gradients(bool by_sum) {
  return on_ranks(2, [by_sum](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world);
    const Samples all = make_samples(8, DType::kF64);
    const bool first = world.rank() == 0;
    const Samples mine{slice(all.x, 0, first ? 0 : 5, first ? 5 : 8),
                       slice(all.y, 0, first ? 0 : 5, first ? 5 : 8)};
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
  Sequential model = make_mlp(DType::kF64);
  mse(model, make_samples(8, DType::kF64)).backward();
  const Values right = grads_of(model);
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
  // 5 and 3 samples: the statistics cover all 8.
  const auto stats = on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_norm_net();
    ddp::convert_sync_batchnorm(model, world);
    const Samples all = make_samples(8, DType::kF64);
    const bool first = world.rank() == 0;
    NoGrad no_grad;
    model(slice(all.x, 0, first ? 0 : 5, first ? 5 : 8));
    return values_of(model.buffers());
  });
  Sequential model = make_norm_net();
  NoGrad no_grad;
  model(make_samples(8, DType::kF64).x);
  EXPECT_LT(largest_difference(stats[0], values_of(model.buffers())), 1e-12);
  EXPECT_EQ(stats[0], stats[1]);
}

// --- The language models, as the program trains them -------------------------

const char* const kTinyGpt =
    R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 16,)"
    R"("n_embd": 16, "n_layer": 2, "n_head": 2})";

Options tiny_options(DType dtype, const std::string& model) {
  Options options;
  options.model = model;
  options.data = "random";
  options.cluster = "none";
  options.dtype = dtype;
  options.batch = 24;
  options.seq = 8;
  options.steps = 3;
  options.optimizer_options.lr = 1e-3;
  options.deterministic = true;
  return options;
}

Report train_language(int d, Options options,
                      const ddp::StrategyOptions& setup) {
  options.world_size = d;
  return sharded_test::report_of<ddp::DdpStrategy>(options, setup);
}

TEST_P(DdpParity, ATiedGptEqualsOneDeviceAlsoWithDropout) {
  const int d = GetParam();
  Options options = tiny_options(DType::kF64, kTinyGpt);
  for (const double dropout : {0.0, 0.1}) {
    options.dropout = dropout;
    for (const std::int64_t accumulate : {1, d == 3 ? 4 : 3}) {
      ddp::StrategyOptions setup;
      setup.micro_batches = accumulate;
      sharded_test::expect_claims(train_language(d, options, setup),
                                  "dropout " + std::to_string(dropout) +
                                      ", accumulate " +
                                      std::to_string(accumulate));
    }
  }
}

TEST(DdpParityOfOne, WorldSizeOneEqualsTheSingleDeviceBitForBit) {
  for (const DType dtype :
       sized<DType>({DType::kF32, DType::kF64, DType::kBF16}, {DType::kF32})) {
    for (const char* model : {kTinyGpt, "mlp"}) {
      for (const bool view : {false, true}) {
        ddp::StrategyOptions setup;
        setup.ddp.gradient_as_bucket_view = view;
        const Report report =
            train_language(1, tiny_options(dtype, model), setup);
        EXPECT_TRUE(report.parity.checked);
        EXPECT_EQ(report.parity.max_abs, 0) << dtype_name(dtype) << model;
      }
    }
  }
}

TEST(DdpTrap, WithoutGlobalPositionsDropoutMasksRepeatOnEveryRank) {
  const auto masks = on_ranks(2, [](ProcessGroup& world) {
    RandomState& random = RankContext::current().random;
    NoGrad no_grad;
    const Tensor ones = Tensor::full({8, 4}, 1);
    const Values same = dropout(ones, 0.5).to_vector<double>();
    random.next_op = 0;
    random.batch = BatchSlice{world.rank(), 2};
    const Values own = dropout(ones, 0.5).to_vector<double>();
    return std::pair(same, own);
  });
  EXPECT_EQ(masks[0].first, masks[1].first);
  EXPECT_NE(masks[0].second, masks[1].second);
}

// --- The bill ----------------------------------------------------------------

TEST_P(DdpParity, BytesAndMemoryAreAsPredicted) {
  const int d = GetParam();
  std::vector<ddp::StrategyOptions> all(7);
  all[1].ddp.gradient_as_bucket_view = true;
  all[2].ddp.find_unused_parameters = true;
  all[3].ddp.static_graph = true;
  all[3].ddp.gradient_as_bucket_view = true;
  all[4].micro_batches = d == 3 ? 4 : 3;
  all[5].comm_hook = "bf16";
  all[6].ddp.bucket_cap_mb = all[6].ddp.first_bucket_mb = 0.005;
  for (const char* model : {kTinyGpt, "mlp"}) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE("configuration " + std::to_string(i) + ", " + model);
      Options options = tiny_options(DType::kF32, model);
      options.check = false;
      sharded_test::expect_bill(train_language(d, options, all[i]));
    }
  }
}

// Buckets are as large as the gradients; the order of the buckets adds an i32
// for each of the mlp's seven parameters. Where gradients lie in the buckets,
// the peak is the buffer in which the weights were sent at the beginning.
TEST(DdpBill, BucketsAreTheGradientsOnceMore) {
  const Options options = tiny_options(DType::kF32, "mlp");
  const double numbers = 4 * 64 * 256 + 256 + 64 + 256;
  for (const bool view : {false, true}) {
    ddp::StrategyOptions setup;
    setup.ddp.gradient_as_bucket_view = view;
    for (const RankReport& rank : train_language(2, options, setup).ranks) {
      const auto kind = static_cast<std::size_t>(MemoryKind::kCommunication);
      EXPECT_EQ(rank.peak[kind].counted, 4 * numbers + (view ? 0 : 7 * 4));
    }
  }
}

TEST(DdpBill, ABatchThatDoesNotDivideIsRefused) {
  Options options = tiny_options(DType::kF32, "mlp");
  options.batch = 25;
  const std::string error = error_on_ranks(4, [&](ProcessGroup& world) {
    ddp::DdpStrategy strategy(options, {}, world);
  });
  EXPECT_TRUE(has_text(error, "--batch 25: does not divide by --world-size 4"))
      << error;
  options.batch = 24;
  ddp::StrategyOptions setup;
  setup.micro_batches = 4;
  EXPECT_TRUE(has_text(error_on_ranks(4,
                                      [&](ProcessGroup& world) {
                                        ddp::DdpStrategy strategy(options,
                                                                  setup, world);
                                      }),
                       "--micro-batches 4: a rank's 6 samples"));
}

}  // namespace
}  // namespace shardbook::ddp_test
