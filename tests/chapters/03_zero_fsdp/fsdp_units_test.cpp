// Units: the layout of their parameters, and the policies that cut a model.

#include <gtest/gtest.h>

#include <array>

#include "tests/chapters/03_zero_fsdp/fsdp_support.h"

namespace shardbook::fsdp_test {
namespace {

using fsdp::auto_wrap;

// --- Layouts -----------------------------------------------------------------

/// The parameters of toy_net.
const std::vector<Shape> kToyShapes = {{8, 4}, {4},     {4, 16},
                                       {16},   {16, 4}, {4}};

TEST(FsdpLayout, GoldenNumbersOfTheToyNet) {
  const zero::ShardLayout three = zero::flat_layout(kToyShapes, 3);
  EXPECT_EQ(three.numel, 184);
  EXPECT_EQ(three.shard_numel, 62);
  EXPECT_EQ(three.full_numel(), 186);
  EXPECT_EQ(zero::flat_layout(kToyShapes, 8).shard_numel, 23);

  // Fewer elements than a multiple: short and empty shards
  const zero::ShardLayout five = zero::flat_layout({{5}}, 4);
  EXPECT_EQ(five.shard_numel, 2);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(five.part(0, r).numel, (std::array{2, 2, 1, 0})[r]);
  }
}

TEST(FsdpLayout, EveryElementHasOneOwnerAndItsPlace) {
  for (const int d : {1, 2, 3, 4, 8, 200}) {
    for (const bool rows : {false, true}) {
      const zero::ShardLayout layout = rows ? zero::row_layout(kToyShapes, d)
                                            : zero::flat_layout(kToyShapes, d);
      for (std::size_t i = 0; i < layout.size(); ++i) {
        std::int64_t next = 0;
        for (int r = 0; r < d; ++r) {
          const zero::OwnedPart part = layout.part(i, r);
          EXPECT_LE(part.shard_begin + part.numel, layout.shard_numel);
          if (part.numel == 0) continue;
          EXPECT_EQ(part.begin, next);
          next += part.numel;
          if (rows) continue;
          // x -> owner x div S, offset x mod S
          const std::int64_t x = layout.offsets[i] + part.begin;
          EXPECT_EQ(r, x / layout.shard_numel);
          EXPECT_EQ(part.shard_begin, x % layout.shard_numel);
        }
        EXPECT_EQ(next, shape_numel(layout.shapes[i]));
      }
    }
  }
}

TEST(FsdpLayout, RowsAreCutByCeilAndRanksMayBeEmpty) {
  const zero::ShardLayout layout = zero::row_layout({{5, 3}, {2}}, 4);
  EXPECT_EQ(layout.chunk, (Numels{6, 1}));
  EXPECT_EQ(layout.shard_numel, 7);
  EXPECT_EQ(layout.part(0, 2).numel, 3);
  EXPECT_EQ(layout.part(0, 3).numel, 0);
  EXPECT_EQ(layout.part(1, 2).numel, 0);
}

// --- Wrapping ----------------------------------------------------------------

std::size_t units_by_size(std::int64_t min_num_params) {
  Sequential model = toy_net();
  return auto_wrap(model, fsdp::size_based_auto_wrap_policy(min_num_params))
      .size();
}

TEST(FsdpWrap, TheToyNetIsOneUnitUnlessTheLimitIsLowered) {
  EXPECT_EQ(units_by_size(100'000'000), 0u);
  // 36, 80, 68: the sizes of the children
  EXPECT_EQ(units_by_size(70), 1u);
  EXPECT_EQ(units_by_size(60), 2u);
  EXPECT_EQ(units_by_size(36), 3u);
}

TEST(FsdpWrap, AParentCountsWhatItsChildrenLeft) {
  Sequential inner = toy_net();
  Sequential outer;
  outer.add(std::move(inner));
  // Of 184, the child of 80 is wrapped first: 104 are left
  EXPECT_EQ(auto_wrap(outer, fsdp::size_based_auto_wrap_policy(80)).size(), 2u);
  EXPECT_EQ(auto_wrap(outer,
                      fsdp::size_based_auto_wrap_policy(80, {}, {"Sequential"}))
                .size(),
            1u);
  EXPECT_EQ(auto_wrap(outer, fsdp::size_based_auto_wrap_policy(105)).size(),
            1u);
  EXPECT_TRUE(
      auto_wrap(outer, fsdp::size_based_auto_wrap_policy(10, {"Sequential"}))
          .empty());
}

TEST(FsdpWrap, ByHandInsideItsScopeOnlyAndOverridesWin) {
  Sequential model = toy_net();
  fsdp::WrapPlan plan;
  wrap(plan, model[0]);
  EXPECT_TRUE(plan.units().empty());
  fsdp::UnitOptions host;
  host.offload_params = true;
  {
    fsdp::EnableWrap scope(plan, host);
    wrap(plan, model[0]);
    wrap(plan, model[1], fsdp::UnitOptions{});
  }
  wrap(plan, model[2]);
  ASSERT_EQ(plan.units().size(), 2u);
  EXPECT_TRUE(plan.units()[0].options->offload_params);
  EXPECT_FALSE(plan.units()[1].options->offload_params);
  on_ranks(2, [&](ProcessGroup& world) {
    Sequential own = toy_net();
    fsdp::WrapPlan own_plan;
    {
      fsdp::EnableWrap scope(own_plan);
      wrap(own_plan, own[1]);
    }
    FullyShardedDataParallel fsdp(own, world, {}, own_plan);
    EXPECT_EQ(fsdp.units().size(), 2u);
    EXPECT_EQ(fsdp.units()[0]->layout().numel, 36 + 68);
    EXPECT_EQ(fsdp.units()[1]->layout().numel, 80);
  });
}

/// Two modules that share one table.
class Tied : public ModuleOf<Tied> {
 public:
  Tied() : a("a", 4, 4, init_of(DType::kF64), false), b(a) {}
  Tensor forward(const Tensor& x) override { return b(relu(a(x))); }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
  }
  Linear a, b;
};

TEST(FsdpWrap, TiedParametersMustLieInOneUnit) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Tied model;
    FullyShardedDataParallel fsdp(model, world,
                                  {.auto_wrap_policy = every_linear()});
  });
  expect_text(error, {"'a.weight' of unit 'a' and 'b.weight' of unit 'b' are "
                      "one tensor"});
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    Tied model;
    FullyShardedDataParallel fsdp(model, world);
    EXPECT_EQ(fsdp.units()[0]->layout().numel, 16);
    sum(fsdp(Tensor::full({2, 4}, 1.0 + world.rank(), {DType::kF64, {}})))
        .backward();
    return fsdp.clip_grad_norm_(1e9);
  });
  Tied one;
  scale(add(sum(one(Tensor::full({2, 4}, 1, {DType::kF64, {}}))),
            sum(one(Tensor::full({2, 4}, 2, {DType::kF64, {}})))),
        0.5)
      .backward();
  EXPECT_NEAR(grads[0], grad_norm(one.parameters()), 1e-12);
}

}  // namespace
}  // namespace shardbook::fsdp_test
