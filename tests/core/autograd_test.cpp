// The tape: which gradients flow, in which order, and how long tensors live.

#include "core/autograd.h"

#include "tests/core/support.h"

namespace shardbook {
namespace {

using autograd::backward;

TEST(Backward, SumsWhereADiamondCloses) {
  const Tensor x = leaf_of({2, 3}, {2});
  const Tensor a = square(x);    // 4, 9
  const Tensor b = scale(a, 3);  // 12, 27
  const Tensor c = mul(a, a);    // 16, 81
  sum(add(b, c)).backward();     // d = (3 + 2a) 2x
  EXPECT_EQ(values(x.grad()), (std::vector<double>{44, 126}));
}

TEST(Backward, AccumulatesOverCallsUntilCleared) {
  const Tensor x = leaf_of({2}, {1});
  sum(square(x)).backward();
  sum(square(x)).backward();
  EXPECT_EQ(x.grad().item(), 8);
  x.clear_grad();
  EXPECT_FALSE(x.grad().defined());
  sum(square(x)).backward();
  EXPECT_EQ(x.grad().item(), 4);
}

TEST(Backward, RunsLaterOperationsFirst) {
  std::vector<std::string> order;
  const Tensor x = leaf({2});
  Tensor y = noted(x, "a", &order);
  const Tensor side = noted(x, "b", &order);
  y = noted(y, "c", &order);
  sum(add(side, y)).backward();
  EXPECT_EQ(order, (std::vector<std::string>{"c", "b", "a"}));
}

TEST(Backward, NeedsAScalarOrAGradient) {
  const Tensor x = leaf({2});
  expect_error([&] { square(x).backward(); }, {"[2]", "not a scalar"});
  expect_error([&] { backward({square(x)}, {Tensor::zeros({3})}); },
               {"[3]", "[2]"});
  expect_error([&] { backward({}); }, {"no outputs"});
  const Tensor y = square(x);
  expect_error(
      [&] {
        backward({y}, {ones_like(y), ones_like(y)});
      },
      {"2 gradients for 1 outputs"});
  expect_error([&] { sum(noise({2})).backward(); }, {"requires a gradient"});
}

TEST(Backward, OfSeveralOutputsWithGivenGradients) {
  const Tensor x = leaf_of({1, 2}, {2}), w = leaf_of({3}, {1});
  const Tensor shared = mul(x, w);
  const Tensor y = square(shared), z = scale(shared, 10);
  backward({y, z, sum(x)},
           {Tensor::from_values<double>({1, 0}, {2}),
            Tensor::from_values<double>({0, 1}, {2}), Tensor()});
  // dy0 = 2 * 3 * w = 18 for x0; dz1 = 10 w = 30 for x1; and 1 each.
  EXPECT_EQ(values(x.grad()), (std::vector<double>{19, 31}));
  // w: 2 * 3 * x0 + 10 * x1.
  EXPECT_EQ(w.grad().item(), 26);
}

TEST(Backward, AnOutputMayLieBelowAnother) {
  const Tensor x = leaf_of({3}, {1});
  const Tensor y = square(x), z = square(y);
  backward({y, z}, {ones_like(y), ones_like(z)});
  EXPECT_EQ(x.grad().item(), 6 + 4 * 27);
  x.clear_grad();
  const Tensor u = square(x);
  backward({u, u}, {ones_like(u), ones_like(u)});
  EXPECT_EQ(x.grad().item(), 12);
}

TEST(Backward, OfALeafIsItsGradient) {
  const Tensor x = leaf_of({3}, {});
  x.backward();
  EXPECT_EQ(x.grad().item(), 1);
  const Tensor given = Tensor::full({}, 5, x.options());
  backward({x}, {given});
  EXPECT_EQ(x.grad().item(), 6);
  EXPECT_EQ(given.item(), 5);
}

TEST(Backward, TheGivenGradientStaysTheCallers) {
  const Tensor x = leaf_of({1, 1}, {2});
  const Tensor given = Tensor::full({2}, 2, x.options());
  backward({x}, {given});
  EXPECT_FALSE(x.grad().shares_storage(given));
  backward({x}, {given});
  EXPECT_EQ(values(given), (std::vector<double>{2, 2}));
}

// The backward of add returns the same array for both operands.
TEST(Backward, TwoLeavesNeverShareAGradient) {
  const Tensor a = leaf_of({1, 2}, {2}), b = leaf_of({3, 4}, {2});
  const Tensor y = add(a, b);
  backward({y}, {ones_like(y)});
  EXPECT_FALSE(a.grad().shares_storage(b.grad()));
  sum(a).backward();
  EXPECT_EQ(values(a.grad()), (std::vector<double>{2, 2}));
  EXPECT_EQ(values(b.grad()), (std::vector<double>{1, 1}));
}

TEST(Graph, RetainedRunsAgain) {
  const Tensor x = leaf_of({3}, {1});
  const Tensor y = sum(square(x));
  backward({y}, {}, /*retain_graph=*/true);
  backward({y}, {}, /*retain_graph=*/true);
  EXPECT_EQ(x.grad().item(), 12);
  y.backward();
  EXPECT_EQ(x.grad().item(), 18);
  expect_error([&] { y.backward(); }, {"freed", "retain_graph"});
}

TEST(Graph, APartThatWasFreedIsNamed) {
  const Tensor x = leaf({2});
  const Tensor shared = exp(x);
  sum(shared).backward();
  const Tensor again = sum(square(shared));
  expect_error([&] { again.backward(); }, {"'exp'", "retain_graph"});
}

TEST(Graph, AHundredThousandNodesNeedNoStack) {
  const Tensor x = leaf_of({1}, {1});
  {
    Tensor y = x;
    for (int i = 0; i < 100000; ++i) y = mul(y, x);
    sum(y).backward();
    EXPECT_EQ(x.grad().item(), 100001);
  }
  // Freed even without a backward.
  Tensor y = x;
  for (int i = 0; i < 100000; ++i) y = square(y);
  y = Tensor();
}

TEST(Graph, SavedTensorsAreFreedAsBackwardPasses) {
  OwnDevice own;
  constexpr std::int64_t kBytes = 8 * 1000;
  constexpr int kLayers = 10;
  const Tensor x = leaf({1000});
  Tensor y = x;
  for (int i = 0; i < kLayers; ++i) y = exp(y);
  Tensor loss = sum(y);
  y = Tensor();
  // The leaf and every layer's saved output.
  EXPECT_EQ(own.device.memory().current_total, (1 + kLayers) * kBytes + 8);
  own.device.reset_peak_memory();
  loss.backward();
  // At the last layer: all saved tensors, the gradients of its output and of
  // its input, the loss; each further layer has one saved tensor fewer.
  EXPECT_EQ(own.device.memory().peak_total, (1 + kLayers + 2) * kBytes + 8);
  // The leaf and its gradient; the loss.
  EXPECT_EQ(own.device.memory().current_total, 2 * kBytes + 8);
}

TEST(Graph, RetainingKeepsWhatIsSaved) {
  const OwnDevice own;
  const Tensor x = leaf({1000});
  const Tensor loss = sum(exp(exp(x)));
  const std::int64_t before = own.device.memory().current_total;
  backward({loss}, {}, /*retain_graph=*/true);
  EXPECT_EQ(own.device.memory().current_total, before + 8000);
}

TEST(NoGrad, AndDetachCutTheGraph) {
  const Tensor x = leaf_of({2}, {1});
  Tensor y;
  {
    NoGrad no_grad;
    y = square(x);
  }
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(y.is_leaf());
  const Tensor z = square(x);
  const Tensor cut = z.detach();
  EXPECT_TRUE(cut.shares_storage(z));
  EXPECT_FALSE(cut.requires_grad());
  sum(add(z, square(cut))).backward();
  EXPECT_EQ(x.grad().item(), 4);
  expect_error([&] { z.set_requires_grad(); }, {"only leaves"});
  expect_error(
      [] {
        Tensor::zeros({1}, {DType::kI64, Device()}).set_requires_grad();
      },
      {"i64"});
}

TEST(NoGrad, HoldsInsideBackward) {
  const Tensor x = leaf({2});
  bool recorded = true;
  x.add_accumulate_hook(
      [&](Tensor& p) { recorded = square(p).requires_grad(); });
  sum(x).backward();
  EXPECT_FALSE(recorded);
  EXPECT_TRUE(RankContext::current().grad_enabled);
}

TEST(AtEndOfBackward, RunsOnceAfterAllGradients) {
  const Tensor a = leaf({1}), b = leaf({1});
  int calls = 0;
  b.add_accumulate_hook([&](Tensor&) {
    autograd::at_end_of_backward([&] {
      ++calls;
      EXPECT_TRUE(a.grad().defined());
    });
  });
  sum(mul(a, b)).backward();
  EXPECT_EQ(calls, 1);
  expect_error([] { autograd::at_end_of_backward([] {}); }, {"no backward"});
}

TEST(AtEndOfBackward, ACallbackMayAddAnother) {
  const Tensor a = leaf({1});
  std::vector<int> order;
  a.add_accumulate_hook([&](Tensor&) {
    autograd::at_end_of_backward([&] {
      order.push_back(1);
      autograd::at_end_of_backward([&] { order.push_back(2); });
    });
  });
  sum(a).backward();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(ReachableLeaves, AreThoseThatNeedAGradientEachOnce) {
  const Tensor a = leaf({1}), b = leaf({1}), unused = leaf({1});
  const Tensor constant = noise({1});
  const Tensor y = mul(add(a, b), add(a, constant));
  const Tensors found = autograd::reachable_leaves({y, square(a)});
  ASSERT_EQ(found.size(), 2u);
  int hits = 0;
  for (const Tensor& found_leaf : found) {
    if (found_leaf.is_same(a) || found_leaf.is_same(b)) ++hits;
  }
  EXPECT_EQ(hits, 2);
  EXPECT_TRUE(autograd::reachable_leaves({constant}).empty());
}

TEST(Backward, AnErrorReachesTheCallerAndTheNextBackwardWorks) {
  const Tensor x = leaf_of({2}, {1});
  const Tensor y = with_backward(
      x, [](const Tensors&) -> Tensors { SB_FAIL("on purpose"); });
  expect_error([&] { sum(y).backward(); }, {"on purpose"});
  EXPECT_TRUE(RankContext::current().grad_enabled);
  EXPECT_EQ(RankContext::current().phase, Phase::kForward);
  EXPECT_EQ(RankContext::current().graph_task, nullptr);
  sum(square(x)).backward();
  EXPECT_EQ(x.grad().item(), 4);
}

TEST(Backward, GradientsAreBookedAsGradients) {
  const OwnDevice own;
  Tensor w, b;
  {
    MemoryScope kind(MemoryKind::kParameter);
    w = leaf({10, 20});
    b = leaf({20});
  }
  Tensor x = noise({5, 10});
  sum(linear(x, w, b)).backward();
  x = Tensor();
  const MemoryStats stats = own.device.memory();
  EXPECT_EQ(stats.current(MemoryKind::kParameter), 8 * 220);
  EXPECT_EQ(stats.current(MemoryKind::kGradient), 8 * 220);
  EXPECT_EQ(stats.peak(MemoryKind::kGradient), 8 * 220);
  EXPECT_EQ(stats.current(MemoryKind::kActivation), 0);
}

}  // namespace
}  // namespace shardbook
