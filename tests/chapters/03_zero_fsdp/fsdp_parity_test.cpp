// FSDP against DDP, bit for bit, in every configuration.

#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "chapters/02_ddp/ddp.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::fsdp_test {
namespace {

using fsdp::BackwardPrefetch;

class FsdpParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, FsdpParity,
                         testing::ValuesIn(world_sizes({1, 3, 4})));

struct Variant {
  std::string name;
  FsdpOptions options;
};

std::vector<Variant> variants(const fsdp::WrapPolicy& policy) {
  return {
      {"one unit", {}},
      {"units", {.auto_wrap_policy = policy}},
      {"shard grad op",
       {.sharding_strategy = ShardingStrategy::kShardGradOp,
        .auto_wrap_policy = policy,
        .backward_prefetch = BackwardPrefetch::kPost}},
      {"no shard",
       {.sharding_strategy = ShardingStrategy::kNoShard,
        .auto_wrap_policy = policy}},
      {"forward prefetch",
       {.auto_wrap_policy = policy,
        .backward_prefetch = BackwardPrefetch::kPost,
        .forward_prefetch = true,
        .limit_all_gathers = false}},
      {"original parameters",
       {.auto_wrap_policy = policy,
        .backward_prefetch = BackwardPrefetch::kNone,
        .use_orig_params = true}},
      {"per parameter", {.auto_wrap_policy = policy, .per_parameter = true}},
      {"offload", {.auto_wrap_policy = policy, .cpu_offload = {true}}}};
}

/// DDP's hook that divides as FSDP does: the same bits for every d.
ddp::CommHook divide_twice(int d) {
  const double f = fsdp::gradient_predivide_factor(d);
  return [f, d](const ddp::GradBucket& bucket, ProcessGroup& group) {
    bucket.gradients.copy_from(scale(bucket.gradients, 1 / f));
    group.all_reduce(bucket.gradients).wait();
    bucket.gradients.copy_from(scale(bucket.gradients, 1 / (d / f)));
    return [] {};
  };
}

OptimizerOptions options_of(const std::string& optimizer) {
  OptimizerOptions options;
  options.lr = optimizer == "sgd" ? 0.05 : 0.01;
  options.momentum = optimizer == "sgd" ? 0.9 : 0;
  options.weight_decay = 0.01;
  return options;
}

Tensor gpt_loss(Module& model, const Batch& batch) {
  return language_loss(model(batch.inputs), batch.targets);
}

template <typename Wrapped>
void train_three_steps(Wrapped& model, const Tensors& parameters,
                       const std::string& optimizer, const ProcessGroup& world,
                       const std::function<void()>& clear_grad) {
  const auto optim =
      make_optimizer(optimizer, parameters, options_of(optimizer));
  for (std::uint64_t step = 0; step < 3; ++step) {
    const Batch mine = tokens_of(24, step, world.rank(), world.size());
    language_loss(model(mine.inputs), mine.targets).backward();
    optim->step();
    clear_grad();
  }
}

Values train_gpt_ddp(int d, DType dtype, const std::string& optimizer,
                     bool hooked) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Gpt model(tiny_gpt_config(), init_of(dtype));
    ddp::DistributedDataParallel ddp(model, world);
    if (hooked) ddp.register_comm_hook(divide_twice(d));
    train_three_steps(ddp, model.parameters(), optimizer, world,
                      [&] { model.clear_grad(); });
    return values_of(model.parameters());
  })[0];
}

std::vector<Values> train_gpt(int d, DType dtype, const std::string& optimizer,
                              const FsdpOptions& options,
                              bool recompute = false) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Gpt model(tiny_gpt_config(), init_of(dtype));
    set_recompute(model, recompute);
    FullyShardedDataParallel fsdp(model, world, options);
    train_three_steps(fsdp, fsdp.parameters(), optimizer, world,
                      [&] { fsdp.clear_grad(); });
    return whole_parameters(fsdp);
  });
}

// [BIT]
TEST_P(FsdpParity, EqualsDdpBitForBitInEveryConfiguration) {
  const int d = GetParam();
  const bool is_power = (d & (d - 1)) == 0;
  for (const std::string optimizer : {"sgd", "adam", "adamw"}) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      if (dtype == DType::kF64 && optimizer != "adamw") continue;
      const Values want = train_gpt_ddp(d, dtype, optimizer, !is_power);
      for (const Variant& variant : variants(every_block())) {
        for (const Values& rank :
             train_gpt(d, dtype, optimizer, variant.options)) {
          EXPECT_EQ(rank, want)
              << variant.name << " " << optimizer << " " << dtype_name(dtype);
        }
      }
    }
  }
}

TEST(FsdpDivision, IsRoundedTwiceUnlessRanksAreAPowerOfTwo) {
  EXPECT_EQ(fsdp::gradient_predivide_factor(1), 1);
  EXPECT_EQ(fsdp::gradient_predivide_factor(2), 2);
  EXPECT_EQ(fsdp::gradient_predivide_factor(3), 2);
  EXPECT_EQ(fsdp::gradient_predivide_factor(4), 2);
  EXPECT_EQ(fsdp::gradient_predivide_factor(8), 4);
  EXPECT_EQ(fsdp::gradient_predivide_factor(64), 8);
  EXPECT_NE(train_gpt_ddp(3, DType::kF32, "sgd", true),
            train_gpt_ddp(3, DType::kF32, "sgd", false));
}

TEST_P(FsdpParity, RecomputedBlocksChangeNothing) {
  const int d = GetParam();
  for (const Variant& variant : variants(every_block())) {
    EXPECT_EQ(train_gpt(d, DType::kF32, "adamw", variant.options, true),
              train_gpt(d, DType::kF32, "adamw", variant.options, false))
        << variant.name;
  }
  // Units inside recomputed blocks
  const FsdpOptions inner{.auto_wrap_policy = every_linear()};
  EXPECT_EQ(train_gpt(d, DType::kF32, "adamw", inner, true),
            train_gpt(d, DType::kF32, "adamw", inner, false));
}

// [RED] the sum is taken in another order.
TEST(FsdpHybrid, EqualsFullShardUpToTheOrderOfSums) {
  const Values want = train_gpt_ddp(8, DType::kF64, "adamw", false);
  for (const int f : {1, 2, 4, 8}) {
    const FsdpOptions options{
        .sharding_strategy = ShardingStrategy::kHybridShard,
        .shard_size = f,
        .auto_wrap_policy = every_block()};
    for (const Values& rank : train_gpt(8, DType::kF64, "adamw", options)) {
      EXPECT_LT(largest_difference(rank, want), 1e-10) << f;
    }
  }
}

TEST(FsdpHybrid, TheNodeMustDivideTheRanks) {
  expect_text(
      error_on_ranks(4,
                     [](ProcessGroup& world) {
                       Sequential model = make_mlp(DType::kF32);
                       FullyShardedDataParallel fsdp(
                           model, world,
                           {.sharding_strategy = ShardingStrategy::kHybridShard,
                            .shard_size = 3});
                     }),
      {"shard_size 3 for 4 ranks; give a divisor of 4"});
}

// --- Accumulation ------------------------------------------------------------

/// Two micro-batches per step; rank 0's parameters and gather counts.
struct Accumulated {
  Values parameters;
  std::size_t gathers = 0, reductions = 0;
};

Accumulated accumulate(int d, bool no_sync, const FsdpOptions& options) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    FullyShardedDataParallel fsdp(model, world, options);
    const auto optim = make_optimizer("sgd", fsdp.parameters(), {0.05});
    world.clear_records();
    for (int micro = 0; micro < 2; ++micro) {
      const Samples mine = every(
          make_samples(24, DType::kF64, 10 + static_cast<std::uint64_t>(micro)),
          world.rank(), d);
      std::optional<fsdp::NoSync> scope;
      if (no_sync && micro == 0) scope.emplace(fsdp);
      scale(mse_loss(fsdp(mine.x), mine.y), 0.5).backward();
    }
    Accumulated result;
    result.gathers = records_of(world, CommOp::kAllGather, "gather").size();
    result.reductions = records_of(world, CommOp::kReduceScatter).size();
    optim->step();
    result.parameters = whole_parameters(fsdp);
    return result;
  })[0];
}

TEST_P(FsdpParity, AccumulatesInShardsOrWholeWithoutSync) {
  const int d = GetParam();
  Sequential one = make_mlp(DType::kF64);
  for (std::uint64_t micro = 0; micro < 2; ++micro) {
    scale(mse(one, make_samples(24, DType::kF64, 10 + micro)), 0.5).backward();
  }
  make_optimizer("sgd", one.parameters(), {0.05})->step();
  for (const Variant& variant : variants(every_linear())) {
    const Accumulated synced = accumulate(d, false, variant.options);
    const Accumulated kept = accumulate(d, true, variant.options);
    EXPECT_LT(
        largest_difference(synced.parameters, values_of(one.parameters())),
        1e-12)
        << variant.name;
    EXPECT_LT(largest_difference(kept.parameters, synced.parameters), 1e-12);
    EXPECT_EQ(synced.gathers, kept.gathers);
    EXPECT_EQ(synced.reductions, 2 * kept.reductions) << variant.name;
  }
}

// --- Mixed precision ---------------------------------------------------------

/// One step of SGD by hand, with gradients computed in bf16 and sent in
/// `reduce`: FSDP must equal it bit for bit.
Values step_in_few_bits(int d, DType reduce) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Gpt full(tiny_gpt_config(), init_of(DType::kF32));
    Gpt model(tiny_gpt_config(), init_of(DType::kBF16));
    const Tensors kept = full.parameters(), cast = model.parameters();
    for (std::size_t i = 0; i < kept.size(); ++i) cast[i].copy_from(kept[i]);
    gpt_loss(model, tokens_of(8, 3, world.rank(), d)).backward();
    NoGrad no_grad;
    const double f = fsdp::gradient_predivide_factor(d);
    for (std::size_t i = 0; i < kept.size(); ++i) {
      Tensor grad = to_dtype(scale(cast[i].grad(), 1 / f), reduce);
      world.all_reduce(grad).wait();
      kept[i].set_grad(to_dtype(scale(grad, f / d), DType::kF32));
    }
    make_optimizer("sgd", kept, {0.5})->step();
    return values_of(kept);
  })[0];
}

TEST(FsdpMixedPrecision, TravelsInFewBitsAndUpdatesInF32) {
  FsdpOptions options;
  options.auto_wrap_policy = every_block();
  options.mixed_precision.param_dtype = DType::kBF16;
  for (const bool wide : {false, true}) {
    if (wide) options.mixed_precision.reduce_dtype = DType::kF32;
    for (const bool rows : {false, true}) {
      options.per_parameter = rows;
      const auto ranks = on_ranks(4, [&](ProcessGroup& world) {
        Gpt model(tiny_gpt_config(), init_of(DType::kF32));
        FullyShardedDataParallel fsdp(model, world, options);
        world.clear_records();
        const Batch mine = tokens_of(8, 3, world.rank(), 4);
        const Tensor loss = language_loss(fsdp(mine.inputs), mine.targets);
        loss.backward();
        for (const CommRecord& record : world.records()) {
          EXPECT_EQ(record.dtype, record.op == CommOp::kReduceScatter && wide
                                      ? DType::kF32
                                      : DType::kBF16);
        }
        for (const Tensor& shard : fsdp.parameters()) {
          EXPECT_EQ(shard.dtype(), DType::kF32);
          EXPECT_EQ(shard.grad().dtype(), DType::kF32);
        }
        make_optimizer("sgd", fsdp.parameters(), {0.5})->step();
        return whole_parameters(fsdp);
      });
      const Values want =
          step_in_few_bits(4, wide ? DType::kF32 : DType::kBF16);
      for (const Values& rank : ranks) EXPECT_EQ(rank, want);
    }
  }
}

class NormNet : public ModuleOf<NormNet> {
 public:
  NormNet()
      : a("a", 5, 6, init_of(DType::kF32)),
        norm(6, init_of(DType::kF32)),
        b("b", 6, 3, init_of(DType::kF32)),
        table(Tensor::full({4}, 0.1)) {}
  Tensor forward(const Tensor& x) override { return b(relu(norm(a(x)))); }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("norm", norm);
    visit.module("b", b);
    visit.buffer("table", table);
  }
  Linear a;
  BatchNorm norm;
  Linear b;
  Tensor table;
};

TEST(FsdpMixedPrecision, BatchNormStaysOutOfIt) {
  on_ranks(2, [](ProcessGroup& world) {
    NormNet model;
    FsdpOptions options;
    options.mixed_precision.param_dtype = DType::kBF16;
    options.mixed_precision.buffer_dtype = DType::kBF16;
    FullyShardedDataParallel fsdp(model, world, options);
    const Samples mine = every(make_samples(8, DType::kF32), world.rank(), 2);
    const Tensor y = fsdp(mine.x);
    EXPECT_EQ(y.dtype(), DType::kBF16);
    sum(y).backward();
    EXPECT_EQ(model.norm.weight.dtype(), DType::kF32);
    EXPECT_EQ(model.norm.running_mean.dtype(), DType::kF32);
    EXPECT_EQ(model.table.dtype(), DType::kBF16);
    EXPECT_EQ(model.a.weight.dtype(), DType::kBF16);
    EXPECT_EQ(fsdp.units().size(), 2u);
  });
}

// --- Clipping ----------------------------------------------------------------

TEST_P(FsdpParity, ClipsByTheNormOverAllShards) {
  const int d = GetParam();
  Sequential one = make_mlp(DType::kF64);
  mse(one, make_samples(24, DType::kF64)).backward();
  const double want = clip_grad_norm(one.parameters(), 0.1);
  make_optimizer("sgd", one.parameters(), {0.5})->step();
  for (const Variant& variant : variants(every_linear())) {
    const auto ranks = on_ranks(d, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64);
      FullyShardedDataParallel fsdp(model, world, variant.options);
      const Samples mine =
          every(make_samples(24, DType::kF64), world.rank(), d);
      mse_loss(fsdp(mine.x), mine.y).backward();
      // A gradient within the limit is left as it is
      const double norm = fsdp.clip_grad_norm_(1e6);
      EXPECT_EQ(fsdp.clip_grad_norm_(0.1), norm) << variant.name;
      make_optimizer("sgd", fsdp.parameters(), {0.5})->step();
      return std::pair(norm, whole_parameters(fsdp));
    });
    for (const auto& [norm, whole] : ranks) {
      EXPECT_NEAR(norm, want, 1e-12) << variant.name;
      EXPECT_LT(largest_difference(whole, values_of(one.parameters())), 1e-12);
    }
  }
}

}  // namespace
}  // namespace shardbook::fsdp_test
