// ZeRO-3's runtime: units, fetches, recomputation, graphs that change; and all
// stages on language models.

#include <gtest/gtest.h>

#include <algorithm>

#include "chapters/common/run/training.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"

namespace shardbook::zero_test {
namespace {

using zero::plan_units;
using zero::UnitPlan;

ModelConfig tiny_config(double dropout = 0) {
  ModelConfig config{"gpt2", 61, 16, 12, 3, 2};
  config.dropout = dropout;
  return config;
}

std::vector<std::string> names_of(const std::vector<UnitPlan>& units) {
  std::vector<std::string> names;
  for (const UnitPlan& unit : units) names.push_back(unit.name);
  return names;
}

using Names = std::vector<std::string>;

// --- Units -------------------------------------------------------------------

TEST(ZeroUnits, BlocksAreUnitsAndTheRootHasTheRest) {
  const auto model = make_model(tiny_config(), init_of(DType::kF32));
  const auto units = plan_units(*model, {"GptBlock"});
  EXPECT_EQ(names_of(units), (Names{"", "transformer.h.0", "transformer.h.1",
                                    "transformer.h.2"}));
  Names root;
  for (const NamedTensor& entry : units[0].parameters) {
    root.push_back(entry.name);
  }
  EXPECT_EQ(root, (Names{"transformer.wte.weight", "transformer.wpe.weight",
                         "transformer.ln_f.weight", "transformer.ln_f.bias"}));
  EXPECT_EQ(units[1].parameters.size(), 12u);
}

TEST(ZeroUnits, WithoutBlocksEachModuleWithParametersIsOne) {
  Sequential model = make_mlp(DType::kF32);
  EXPECT_EQ(names_of(plan_units(model, {"GptBlock"})), (Names{"0", "2", "4"}));
  EXPECT_EQ(names_of(plan_units(model, {"Linear"})), (Names{"0", "2", "4"}));
}

TEST(ZeroUnits, AParameterOfTwoModulesBelongsToTheRoot) {
  Sequential model;
  const Linear linear("0", 4, 4, init_of(DType::kF32));
  model.add(Linear(linear));
  model.add(Linear("1", 4, 4, init_of(DType::kF32)));
  model.add(Linear(linear));
  const auto units = plan_units(model, {});
  EXPECT_EQ(names_of(units), (Names{"", "1"}));
  EXPECT_EQ(units[0].parameters.size(), 2u);
}

// --- Language models ---------------------------------------------------------

Tensor token_rows(std::int64_t first, std::int64_t stride) {
  std::vector<std::int64_t> values;
  for (std::int64_t row = 0; row < 2; ++row) {
    for (std::int64_t i = 0; i < 8; ++i) {
      values.push_back((7 * (first + row * stride) + i * i) % 61);
    }
  }
  return Tensor::from_values<std::int64_t>(values, {2, 8});
}

/// Three steps of AdamW on a tied GPT; stage 0 is DDP.
State train_gpt(int d, DType dtype, bool recompute, double dropout,
                const ZeroOptions& options) {
  return on_ranks(d, [&](ProcessGroup& world) {
    const auto model = make_model(tiny_config(dropout), init_of(dtype));
    set_recompute(*model, recompute);
    RandomState& random = RankContext::current().random;
    return train_by(
        *model, world, options, "adamw", {}, 3, [&](int step, auto& forward) {
          random.step = static_cast<std::uint64_t>(step);
          random.next_op = 0;
          random.batch = BatchSlice{world.rank(), d};
          const Tensor targets = token_rows(step + 1 + world.rank(), d);
          language_loss(forward(token_rows(step + world.rank(), d)), targets)
              .backward();
        });
  })[0];
}

// [BIT] Tied table, positions that the root reads, recomputation, dropout.
TEST(ZeroGpt, EveryStageEqualsDdpBitForBit) {
  for (const int d : {1, 2, 3, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const double dropout : {0.0, 0.1}) {
        const State ddp = train_gpt(d, dtype, false, dropout, stage(0));
        for (int number = 1; number <= 3; ++number) {
          for (const bool recompute : {false, true}) {
            ZeroOptions options = stage(number);
            if (recompute) {
              options.persistence_threshold = 100;
              options.reduce_bucket_size = 700;
            }
            EXPECT_EQ(
                first_difference(
                    train_gpt(d, dtype, recompute, dropout, options), ddp),
                "")
                << "stage " << number << " on " << d << ", dropout " << dropout
                << (recompute ? ", recomputed" : "");
          }
        }
      }
    }
  }
}

int count_gathers(ProcessGroup& world, const std::string& unit) {
  int count = 0;
  for (const CommRecord& record : world.records()) {
    count += record.label == "fetch " + unit;
  }
  return count;
}

// --- Graphs that are not a chain ---------------------------------------------

/// The middle layer runs `repeats` times; the last one only when asked.
class Loop : public ModuleOf<Loop> {
 public:
  explicit Loop(std::uint64_t seed = 1)
      : first("first", 5, 6, init_of(DType::kF64, seed)),
        middle("middle", 6, 6, init_of(DType::kF64, seed)),
        last("last", 6, 6, init_of(DType::kF64, seed)) {}
  Tensor forward(const Tensor& x) override {
    Tensor y = first(x);
    for (int i = 0; i < repeats; ++i) y = relu(middle(y));
    return uses_last ? last(y) : y;
  }
  void members(MemberVisitor& visit) override {
    visit.module("first", first);
    visit.module("middle", middle);
    visit.module("last", last);
  }
  Linear first, middle, last;
  int repeats = 1;
  bool uses_last = true;
};

/// Four steps with a forward that changes on the way; stage 0 is DDP, which
/// looks for unused parameters.
State train_loop(int d, int number) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Loop model;
    // Plain SGD: a parameter without a gradient and one with zeros agree
    return train_by(
        model, world, stage(number), "sgd", {0.001}, 4,
        [&](int step, auto& forward) {
          model.repeats = 1 + step % 3;
          model.uses_last = step != 2;
          const Tensor x = every(
              make_samples(12, DType::kF64, static_cast<std::uint64_t>(step)).x,
              world.rank(), d);
          sum(square(forward(x))).backward();
        });
  })[0];
}

TEST(ZeroGraphs, LoopsAndUnusedUnitsEqualDdp) {
  for (const int d : {1, 2, 3}) {
    const State ddp = train_loop(d, 0);
    for (int number = 1; number <= 3; ++number) {
      EXPECT_EQ(first_difference(train_loop(d, number), ddp), "")
          << "stage " << number << " on " << d;
    }
  }
}

TEST(ZeroGraphs, AModuleCalledTwiceIsReducedOnce) {
  const auto counts = on_ranks(2, [](ProcessGroup& world) {
    Loop model;
    model.repeats = 2;
    const auto zero = make_zero(model, world, stage(3), "sgd", {0.001});
    sum((*zero)(Tensor::full({2, 5}, 1, {DType::kF64, Device()}))).backward();
    return std::vector<int>{
        count_gathers(world, "middle"),
        static_cast<int>(
            records_of(world, CommOp::kReduceScatter, "reduce middle").size())};
  });
  // Twice forward; in backward it stays until its gradient is complete
  EXPECT_EQ(counts[0], (std::vector<int>{3, 1}));
}

// --- Parameters come and go --------------------------------------------------

TEST(ZeroParameters, AfterItsEndGradientsAreLocalAgain) {
  for (int number = 1; number <= 2; ++number) {
    const auto counts = on_ranks(2, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF32);
      make_zero(model, world, stage(number), "adam", {});
      const std::size_t before = world.records().size();
      sum(model(make_samples(4, DType::kF32).x)).backward();
      return std::pair(world.records().size() - before,
                       model.parameters()[0].grad().defined());
    });
    EXPECT_EQ(counts[0], std::pair(std::size_t{0}, true));
  }
}

TEST(ZeroParameters, OutsideOfForwardTheyHaveNoMemory) {
  on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    const auto zero = make_zero(model, world, stage(3), "adam", {});
    expect_text(error_of([&] { model.parameters()[0].raw(); }),
                {"whose storage was released"});
  });
}

// --- Overlap -----------------------------------------------------------------

/// Notes messages and products in the order of their issue.
class Order : public Observer, public CommObserver {
 public:
  void on_op_end(const OpEvent& event) override {
    if (event.product.m > 0 && event.phase == Phase::kBackward) {
      notes.push_back("product");
    }
  }
  void on_issue(const CommRecord& record) override {
    if (record.phase == Phase::kBackward) notes.push_back(record.label);
  }
  std::vector<std::string> notes;
};

Names notes_of(const ZeroOptions& options) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    const auto zero = make_zero(model, world, options, "adam", {});
    train_zero(*zero, Training(), 0, 1);
    const auto order = std::make_shared<Order>();
    RankContext::current().add_observer(order);
    world.set_observer(order);
    train_zero(*zero, Training(), 1, 2);
    world.set_observer(nullptr);
    RankContext::current().remove_observer(order);
    return order->notes;
  })[0];
}

TEST(ZeroOverlap, BucketsLeaveWhileBackwardStillRuns) {
  ZeroOptions options = stage(2);
  options.reduce_bucket_size = 50;  // one layer or less
  const Names notes = notes_of(options);
  const auto first = std::find(notes.begin(), notes.end(), "bucket 0");
  EXPECT_NE(std::find(first, notes.end(), "product"), notes.end());
  // A single bucket leaves at the end
  options.reduce_bucket_size = 1000;
  EXPECT_EQ(notes_of(options).back(), "bucket 0");
}

TEST(ZeroOverlap, TheNextUnitIsGatheredBeforeThisOneComputes) {
  ZeroOptions options = stage(3);
  const Names ahead = notes_of(options);
  options.prefetch_bucket_size = 0;
  const Names on_demand = notes_of(options);
  EXPECT_EQ(on_demand, (Names{"fetch 4", "product", "product", "reduce 4",
                              "fetch 2", "product", "product", "reduce 2",
                              "fetch 0", "product", "reduce 0"}));
  EXPECT_EQ(ahead, (Names{"fetch 4", "fetch 2", "fetch 0", "product", "product",
                          "reduce 4", "product", "product", "reduce 2",
                          "product", "reduce 0"}));
}

TEST(ZeroOverlap, PrefetchingStopsAtItsLimit) {
  ZeroOptions options = stage(3);
  options.prefetch_bucket_size = 48;  // unit 2 has 48, unit 0 has 42
  EXPECT_EQ(notes_of(options)[1], "fetch 2");
  EXPECT_EQ(notes_of(options)[2], "product");
}

}  // namespace
}  // namespace shardbook::zero_test
