// Plans: the numbers of one device, the calls of the table, and clear errors.

#include "chapters/11_dtensor/parallelize.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <utility>

#include <cmath>
#include <map>

#include "chapters/common/models/models.h"
#include "core/layers.h"
#include "core/optim.h"
#include "tests/chapters/11_dtensor/parallelize_support.h"

namespace shardbook::dtensor_test {
namespace {

// --- The toy of the documents ------------------------------------------------

// Linear 10-32, ReLU, 32-5: equal inputs, one pair of all-reduces.
TEST(DTensorPairwise, EqualsOneDeviceWithAnAllReduceEachWay) {
  for (const int t : {1, 2, 3, 4}) {
    const auto logs = on_tp(t, [](const Mesh& tp, ProcessGroup& world) {
      return calls_of_equal_steps([] { return make_mlp(10, 32, 5); },
                                  noise({20, 10}, 1), {{"", pairwise()}}, tp,
                                  world);
    });
    EXPECT_EQ(logs[0],
              t == 1 ? "" : "all_reduce world 100, all_reduce world 200");
  }
}

// A pair on [16, 256]: 12288 elements on the wire per rank of 4, 14336 of 8.
TEST(DTensorPairwise, SendsTheGoldenNumberOfElements) {
  for (const auto& [t, elements] : {std::pair{4, 12288}, {8, 14336}}) {
    on_tp(t, [t = t, elements = elements](const Mesh& tp, ProcessGroup& world) {
      Sequential model = make_mlp(256, 1024, 256);
      parallelize_module(model, tp, {{"", pairwise()}});
      const Tensor x = noise({16, 256}, 1);
      x.set_requires_grad();
      sum(model(x)).backward();
      SB_CHECK(world.sent_bytes() == elements * 8, world.sent_bytes());
    });
  }
}

// Column, row, column, row: the second pair starts from a replica again.
TEST(DTensorPairwise, FourLayersAreTwoPairs) {
  const auto make = [] {
    const std::int64_t widths[] = {6, 8, 5, 7, 3};
    Sequential model;
    for (int i = 0; i < 4; ++i) {
      if (i > 0) model.add(Relu());
      model.add(
          Linear(std::to_string(2 * i), widths[i], widths[i + 1], f64_init()));
    }
    return model;
  };
  for (const int t : {2, 3}) {
    const auto logs = on_tp(t, [&](const Mesh& tp, ProcessGroup& world) {
      return calls_of_equal_steps(make, noise({4, 6}, 1), {{"", pairwise()}},
                                  tp, world);
    });
    // [4, 5] between the pairs and [4, 3] after them; backward [4, 5], [4, 6]
    EXPECT_EQ(logs[0],
              "all_reduce world 20, all_reduce world 12, all_reduce world 20, "
              "all_reduce world 24");
  }
}

// torch 2.1's SequenceParallel: different rows on every rank, 20 W in all. The
// gradients are sums over the slices' losses.
TEST(DTensorPairwiseSequence, SlicesAreOneBatch) {
  for (const int t : {1, 2, 4}) {
    on_tp(t, [t](const Mesh& tp, ProcessGroup& world) {
      Sequential plain = make_mlp(10, 32, 5), model = make_mlp(10, 32, 5);
      const Tensor whole = noise({20 * t, 10}, 1);
      whole.set_requires_grad();
      const Tensor right = plain(whole);
      sum(square(right)).backward();

      const auto cuts =
          parallelize_module(model, tp, {{"", pairwise_sequence()}});
      const std::int64_t first = 20 * world.rank();
      const Tensor x = whole.rows_view(first, first + 20).clone();
      x.set_requires_grad();
      const Tensor y = model(x);
      const std::size_t forward = world.records().size();
      sum(square(y)).backward();
      const std::size_t end = world.records().size();
      SB_CHECK(error_between(y, right.rows_view(first, first + 20)) < 1e-12,
               "local rows");
      SB_CHECK(error_between(x.grad(),
                             whole.grad().rows_view(first, first + 20)) < 1e-11,
               "input");
      SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < 1e-10,
               "parameters");
      const std::int64_t n = 20 * t;
      const std::string in = std::to_string(10 * n);
      const std::string out = std::to_string(5 * n);
      SB_CHECK(t == 1 || log_since(world, 0).find("all_gather world " + in +
                                                  ", reduce_scatter world " +
                                                  out) == 0,
               log_since(world, 0));
      // Backward gathers what was scattered, and the reverse; a row layer's
      // bias was applied to this rank's rows only
      std::vector<std::string> backward;
      for (std::size_t i = forward; i < end; ++i) {
        backward.push_back(comm_op_name(world.records()[i].op) +
                           (" " + std::to_string(world.records()[i].numel)));
      }
      std::sort(backward.begin(), backward.end());
      const std::vector<std::string> expected = {
          "all_gather " + out, "all_reduce 5", "reduce_scatter " + in};
      SB_CHECK(t == 1 || backward == expected, log_since(world, forward));
    });
  }
}

// torch 2.3's: norms and dropout on slices of the sequence, without calls in
// forward; the parameters' gradients are reduced.
TEST(DTensorSequence, NormalisesSlicesAndReducesParameterGradients) {
  on_tp(4, [](const Mesh& tp, ProcessGroup& world) {
    Sequential plain, model;
    plain.add(LayerNorm(6, f64_init()));
    model.add(LayerNorm(6, f64_init()));
    const Tensor x = noise({2, 8, 6}, 1), weight = noise({2, 8, 6}, 2);
    sum(mul(plain(x), weight)).backward();

    parallelize_module(model, tp, {{"0", sequence()}});
    const std::int64_t first = 2 * world.rank();
    const Tensor y = model(slice(x, 1, first, first + 2));
    SB_CHECK(world.records().empty(), "a call forward");
    sum(mul(y, slice(weight, 1, first, first + 2))).backward();
    SB_CHECK(log_since(world, 0) == "all_reduce world 6, all_reduce world 6",
             log_since(world, 0));
    SB_CHECK(worst_error(whole_gradients(model, tp, {}), plain) < 1e-12,
             "gradients");
  });
}

// --- Single layers, layouts, uneven sizes ------------------------------------

TEST(DTensorStyles, RanksMayHaveNoUnits) {
  on_tp(3, [](const Mesh& tp, ProcessGroup& world) {
    calls_of_equal_steps([] { return make_mlp(5, 2, 4); }, noise({3, 5}, 1),
                         {{"", pairwise()}}, tp, world);
  });
}

TEST(DTensorStyles, LayoutsOfInputsAndOutputsCanBeChosen) {
  const auto make = [] {
    Sequential model;
    model.add(Linear("0", 5, 7, f64_init()));
    return model;
  };
  for (const int t : {2, 3}) {
    on_tp(t, [&](const Mesh& tp, ProcessGroup& world) {
      for (Style style : {colwise(), rowwise()}) {
        style.input = style.output = replicate();
        calls_of_equal_steps(make, noise({6, 5}, 1), {{"0", style}}, tp, world,
                             1e-12);
      }
    });
  }
}

TEST(DTensorStyles, EmbeddingsAreCutByRowsOrColumns) {
  const auto make = [] {
    Sequential model;
    model.add(Embedding("0", 7, 5, f64_init()));
    return model;
  };
  on_tp(3, [&](const Mesh& tp, ProcessGroup& world) {
    const Tensor ids =
        Tensor::from_values(std::vector<std::int64_t>{6, 0, 3, 3, 1, 5}, {6});
    for (Style style : {rowwise(), colwise()}) {
      style.output = replicate();
      calls_of_equal_steps(make, ids, {{"0", style}}, tp, world, 1e-14);
    }
  });
}

// --- Traps and errors --------------------------------------------------------

std::string plan_error(const Plan& plan, bool with_optimizer = false,
                       int ranks = 2) {
  return error_on_tp(ranks, [&](const Mesh& tp, ProcessGroup&) {
    Sequential model = make_mlp(10, 32, 5);
    model.add(Linear("3", 5, 5, f64_init()));
    std::unique_ptr<Optimizer> optimizer;
    if (with_optimizer) {
      optimizer = make_optimizer("sgd", model.parameters(), {});
    }
    parallelize_module(model, tp, plan);
  });
}

TEST(DTensorPlanErrors, NameWhatIsWrong) {
  expect_text(plan_error({{"", pairwise()}}), {"has 3 Linear layers", "even"});
  expect_text(plan_error({{"7", colwise()}}), {"the plan names '7'"});
  expect_text(plan_error({{"1", colwise()}}), {"'1' is a Relu"});
  EXPECT_EQ(plan_error({{"0", colwise()}, {"2", rowwise()}}), "");
}

TEST(DTensorPlanErrors, AnOptimizerThatCameFirstIsFound) {
  expect_text(
      plan_error({{"0", colwise()}, {"2", rowwise()}}, /*with_optimizer=*/true),
      {"'0.weight' is replaced, and is also held outside the model; create the "
       "optimizer after parallelize_module"});
}

TEST(DTensorPlanErrors, ARowwiseEmbeddingNeedsAllIndices) {
  const std::string refused = error_on_tp(2, [](const Mesh& tp, ProcessGroup&) {
    Sequential model;
    model.add(Embedding("0", 7, 5, f64_init()));
    Style style = rowwise();
    style.input = shard(0);
    parallelize_module(model, tp, {{"0", style}});
  });
  expect_text(refused, {"a rowwise Embedding with input S(0); each rank needs "
                        "all indices, give R"});
}

// Trap: the optimizer of the whole model trains unused tensors.
TEST(DTensorTrap, AnOptimizerOfTheOldParametersTrainsNothing) {
  on_tp(2, [](const Mesh& tp, ProcessGroup&) {
    Sequential model = make_mlp(10, 32, 5), old = make_mlp(10, 32, 5);
    const auto early = make_optimizer("sgd", old.parameters(), {});
    parallelize_module(model, tp, {{"", pairwise()}});
    const auto late = make_optimizer("sgd", model.parameters(), {});
    const Tensor before = model.parameters()[0].clone();
    sum(square(model(noise({4, 10}, 1)))).backward();
    early->step();
    SB_CHECK(bitwise_equal(model.parameters()[0], before), "no change");
    late->step();
    SB_CHECK(!bitwise_equal(model.parameters()[0], before), "a change");
  });
}

}  // namespace
}  // namespace shardbook::dtensor_test
