// Modules that run twice or never, frozen parameters, and the state between
// steps.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/support/errors.h"

namespace shardbook::fsdp_test {
namespace {

// --- Modules used otherwise than once ----------------------------------------

class Uses : public ModuleOf<Uses> {
 public:
  Uses()
      : a("a", 5, 5, init_of(DType::kF64)),
        b("b", 5, 5, init_of(DType::kF64)),
        c("c", 5, 3, init_of(DType::kF64)) {}
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (const char name : use) y = relu(name == 'a' ? a(y) : b(y));
    return c(y);
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
    visit.module("c", c);
  }
  Linear a, b, c;
  std::string use = "ab";
};

struct Used {
  Labels labels;
  Values parameters;
  std::vector<bool> has_grad;
};

Used run_uses(const std::string& use) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Uses model;
    model.use = use;
    FullyShardedDataParallel fsdp(model, world,
                                  {.auto_wrap_policy = every_linear()});
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    Used used;
    mse_loss(fsdp(mine.x), mine.y).backward();
    used.labels = labels_of(world.records());
    for (const Tensor& shard : fsdp.parameters()) {
      used.has_grad.push_back(shard.grad().defined());
    }
    make_optimizer("sgd", fsdp.parameters(), {0.1})->step();
    used.parameters = whole_parameters(fsdp);
    return used;
  })[0];
}

Values one_device(const std::string& use) {
  Uses model;
  model.use = use;
  mse(model, make_samples(8, DType::kF64)).backward();
  make_optimizer("sgd", model.parameters(), {0.1})->step();
  return values_of(model.parameters());
}

TEST(FsdpUses, AModuleThatRunsTwiceIsGatheredTwiceAndReducedOnce) {
  for (const std::string use : {"aab", "aba"}) {
    const Used used = run_uses(use);
    EXPECT_LT(largest_difference(used.parameters, one_device(use)), 1e-12);
    auto count = [&](const std::string& label) {
      return std::count(used.labels.begin(), used.labels.end(), label);
    };
    EXPECT_EQ(count("gather a"), 3) << use;  // once more for backward
    EXPECT_EQ(count("reduce a"), 1) << use;
  }
}

TEST(FsdpUses, AUnitThatIsNotUsedHasNoGradientAndIsNotTouched) {
  const Used used = run_uses("a");
  EXPECT_EQ(used.has_grad, (std::vector<bool>{true, false, true}));
  EXPECT_LT(largest_difference(used.parameters, one_device("a")), 1e-12);
  EXPECT_EQ(std::count(used.labels.begin(), used.labels.end(), "gather b"), 0);
}

// Units of equal sizes would be accepted in another order, with wrong values.
TEST(FsdpUses, RanksThatUseUnitsInAnotherOrderAreToldSo) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Uses model;
    model.use = world.rank() == 0 ? "ab" : "ba";
    FullyShardedDataParallel fsdp(
        model, world,
        {.auto_wrap_policy = every_linear(), .check_execution_order = true});
    fsdp(make_samples(8, DType::kF64).x);
  });
  expect_text(error, {"rank 0 gathers unit 'a' where rank 1 gathers 'b'"});
}

// --- Frozen parameters -------------------------------------------------------

TEST(FsdpFrozen, AUnitIsTrainedOrFrozenAsAWhole) {
  auto run = [](bool orig, bool rows) {
    return error_on_ranks(2, [=](ProcessGroup& world) {
      Uses model;
      model.a.weight.set_requires_grad(false);
      const Values frozen = model.a.weight.to_vector<double>();
      FullyShardedDataParallel fsdp(model, world,
                                    {.auto_wrap_policy = every_linear(),
                                     .use_orig_params = orig,
                                     .per_parameter = rows});
      const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
      mse_loss(fsdp(mine.x), mine.y).backward();
      OptimizerOptions decay;
      decay.weight_decay = 0.1;
      make_optimizer("adamw", fsdp.parameters(), decay)->step();
      const auto scope = fsdp.summon_full_params();
      EXPECT_EQ(model.a.weight.to_vector<double>(), frozen);
    });
  };
  expect_text(run(false, false), {"unit 'a' mixes the frozen and the "
                                  "trained"});
  EXPECT_EQ(run(true, false), "");
  EXPECT_EQ(run(false, true), "");
}

TEST(FsdpFrozen, FrozenUnitsReduceNothing) {
  on_ranks(2, [](ProcessGroup& world) {
    Uses model;
    model.b.set_requires_grad(false);
    FullyShardedDataParallel fsdp(model, world,
                                  {.auto_wrap_policy = every_linear()});
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    mse_loss(fsdp(mine.x), mine.y).backward();
    EXPECT_EQ(labels_of(records_of(world, CommOp::kReduceScatter)),
              (Labels{"reduce c", "reduce a"}));
    EXPECT_EQ(fsdp.parameters().size(), 2u);
  });
}

// It lies in no trained shard: nobody would average its gradient, or update it.
TEST(FsdpTrap, AParameterTrainedAfterConstructionIsRefused) {
  for (const bool rows : {false, true}) {
    const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
      Uses model;
      model.b.set_requires_grad(false);
      FullyShardedDataParallel fsdp(
          model, world,
          {.auto_wrap_policy = every_linear(), .per_parameter = rows});
      const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
      model.b.set_requires_grad(true);
      {
        NoGrad no_grad;
        EXPECT_NO_THROW(fsdp(mine.x));  // no backward follows
      }
      fsdp(mine.x);
    });
    expect_text(error, {"'b.weight' was frozen at construction"});
  }
}

// --- Between steps -----------------------------------------------------------

TEST(FsdpSummon, ParametersAreReadAndWrittenInsideTheScopeOnly) {
  on_ranks(3, [](ProcessGroup& world) {
    Sequential model = toy_net();
    const Values before = values_of(model.parameters());
    FullyShardedDataParallel fsdp(model, world);
    EXPECT_THROW(model.parameters()[0].to_vector<float>(), Error);
    {
      const auto scope = fsdp.summon_full_params();
      EXPECT_EQ(values_of(model.parameters()), before);
      model.parameters()[0].fill(2);
    }
    {
      const auto scope = fsdp.summon_full_params(/*writeback=*/false);
      EXPECT_EQ(model.parameters()[0].to_vector<double>(), Values(32, 2.0));
      model.parameters()[0].fill(3);
    }
    EXPECT_EQ(whole_parameters(fsdp)[0], 2.0);
  });
}

// One division after the sum would overflow, one before it underflow.
TEST(FsdpDivision, NeitherAddendsNorSumLeaveTheRangeOfF16) {
  for (const double value : {30000.0, 2e-7}) {
    const auto grads = on_ranks(8, [value](ProcessGroup& world) {
      Linear model("0", 1, 8, init_of(DType::kF32), /*with_bias=*/false);
      FullyShardedDataParallel fsdp(
          model, world, {.mixed_precision = {.reduce_dtype = DType::kF16}});
      sum(fsdp(Tensor::full({1, 1}, value))).backward();
      return fsdp.parameters()[0].grad().to_vector<double>()[0];
    });
    for (const double grad : grads) {
      EXPECT_TRUE(std::isfinite(grad)) << value;
      EXPECT_NEAR(grad, value, value > 1 ? 30 : 1e-7);
    }
  }
}

}  // namespace
}  // namespace shardbook::fsdp_test
