// Recomputation: the same bits, less memory, and the traps.

#include "core/autograd.h"

#include <tuple>

#include "core/layers.h"
#include "core/rope.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

using autograd::recompute;
using Body = std::function<Tensors(const Tensors&)>;

/// Runs `body` plainly or recomputed, from the same random state.
Tensors run(const Body& body, const Tensors& in, bool again) {
  RandomState& random = RankContext::current().random;
  random = RandomState{7, 2, 0, {}};
  return again ? recompute(body, in) : body(in);
}

TEST(Recompute, GivesTheSameBitsAlsoWithDropout) {
  const Tensor w = leaf({12, 12}), b = leaf({12}), x = leaf({6, 12});
  const Body body = [&](const Tensors& in) {
    Tensor h = dropout(gelu(linear(in[0], w, b)), 0.3);
    h = dropout(matmul(h, w), 0.5);
    return Tensors{h};
  };
  auto gradients = [&](bool again) {
    for (const Tensor& t : {w, b, x}) t.clear_grad();
    const Tensor y = run(body, {x}, again)[0];
    // Later draws continue where the body stopped.
    const Tensor z = dropout(y, 0.5);
    weighted_sum(z).backward();
    return Tensors{z.detach(), w.grad(), b.grad(), x.grad()};
  };
  expect_same_bits(gradients(false), gradients(true));
}

TEST(Recompute, GivesTheSameBitsOfALlamaBlock) {
  const Tensor w = leaf({16, 16}), weight = leaf({16}), x = leaf({2, 3, 16});
  // At positions that do not begin at zero
  const Tensor table = rope_table({7, 5, 6}, 4, 100, {}, kOfF64);
  AttentionOptions options = attention_of(2, true, 0.2);
  options.kv_heads = 1;
  const Body body = [&](const Tensors& in) {
    const Tensor qkv = linear(rms_norm(in[0], weight, 1e-6), w);
    const Tensor y = attention(rope(qkv, table, 3, 4), options);
    return Tensors{swiglu(y)};
  };
  auto gradients = [&](bool again) {
    for (const Tensor& t : {w, weight, x}) t.clear_grad();
    const Tensor y = run(body, {x}, again)[0];
    weighted_sum(y).backward();
    return Tensors{y.detach(), w.grad(), weight.grad(), x.grad()};
  };
  expect_same_bits(gradients(false), gradients(true));
}

// Draws between forward and backward must not change the masks.
TEST(Recompute, BringsBackTheRandomStateOfTheForward) {
  const Tensor x = leaf({8, 8});
  const Body body = [](const Tensors& in) {
    return Tensors{dropout(in[0], 0.5)};
  };
  RandomState& random = RankContext::current().random;
  random = RandomState{7, 2, 5, {3, 2}};
  const Tensor y = recompute(body, {x})[0];
  random = RandomState{8, 9, 100, {}};
  autograd::backward({y}, {Tensor::full({8, 8}, 1, y.options())});
  EXPECT_EQ(random.next_op, 100u);
  EXPECT_EQ(random.step, 9u);
  // x.grad is the mask, y is x times the mask (up to the sign of zero).
  EXPECT_EQ(max_abs_difference(mul(x.detach(), x.grad()), y.detach()), 0);
}

// A first block reads data that needs no gradient; a graph that depends on its
// input alone would silently lose the parameters' gradients.
TEST(Recompute, WorksOnInputsThatNeedNoGradient) {
  const Tensor w = leaf_of({3}, {1});
  const Tensor x = Tensor::full({1}, 2, kOfF64);
  const Tensor y = recompute(
      [&](const Tensors& in) { return Tensors{mul(in[0], w)}; }, {x})[0];
  EXPECT_TRUE(y.requires_grad());
  sum(square(y)).backward();
  EXPECT_EQ(w.grad().item(), 24);
  EXPECT_FALSE(x.grad().defined());
}

TEST(Recompute, AcceptsIndicesAsInputs) {
  const Tensor table = leaf({5, 3});
  const Tensor tokens = Tensor::from_values<std::int64_t>({4, 0, 4}, {3});
  const Tensor y = recompute(
      [&](const Tensors& in) { return Tensors{embedding(table, in[0])}; },
      {tokens})[0];
  sum(y).backward();
  EXPECT_EQ(values(sum(table.grad(), 1)), (std::vector<double>{3, 0, 0, 0, 6}));
}

TEST(Recompute, WithSeveralInputsAndOutputs) {
  const Tensor a = leaf({4}), b = leaf({4}), c = noise({4}, 3);
  const Body body = [&](const Tensors& in) {
    const Tensor p = mul(in[0], in[1]);
    return Tensors{exp(p), add(in[0], in[2]), square(in[1])};
  };
  auto gradients = [&](bool again) {
    a.clear_grad();
    b.clear_grad();
    const Tensors y = run(body, {a, b, c}, again);
    // The third output is not used.
    weighted_sum(mul(y[0], y[1])).backward();
    return Tensors{a.grad(), b.grad()};
  };
  expect_same_bits(gradients(false), gradients(true));
}

TEST(Recompute, Nests) {
  const Tensor w = leaf({6, 6}), x = leaf({3, 6});
  int runs = 0;
  const Body inner = [&](const Tensors& in) {
    ++runs;
    return Tensors{dropout(tanh(matmul(in[0], w)), 0.4)};
  };
  auto body = [&](bool nested) -> Body {
    return [&, nested](const Tensors& in) {
      Tensor h = in[0];
      for (int i = 0; i < 3; ++i) {
        h = nested ? recompute(inner, {h})[0] : inner({h})[0];
      }
      return Tensors{dropout(h, 0.2)};
    };
  };
  auto gradients = [&](bool outer, bool nested) {
    w.clear_grad();
    x.clear_grad();
    runs = 0;
    weighted_sum(run(body(nested), {x}, outer)[0]).backward();
    return Tensors{w.grad(), x.grad()};
  };
  const Tensors plain = gradients(false, false);
  EXPECT_EQ(runs, 3);
  for (const auto& [outer, nested, expected_runs] :
       {std::tuple(true, false, 6), {false, true, 6}, {true, true, 9}}) {
    expect_same_bits(gradients(outer, nested), plain);
    EXPECT_EQ(runs, expected_runs);
  }
}

TEST(Recompute, RunsOnceWithoutGradients) {
  int runs = 0;
  const Tensor x = leaf({2});
  NoGrad no_grad;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        ++runs;
        return in;
      },
      {x})[0];
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(y.is_same(x));
}

TEST(Recompute, TellsTheBodyThatItIsTheSecondTime) {
  std::vector<bool> flags;
  std::vector<Phase> phases;
  const Tensor x = leaf({2});
  const Tensor y = recompute(
      [&](const Tensors& in) {
        flags.push_back(RankContext::current().is_recomputing);
        phases.push_back(RankContext::current().phase);
        return Tensors{square(in[0])};
      },
      {x})[0];
  sum(y).backward();
  EXPECT_EQ(flags, (std::vector<bool>{false, true}));
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::kForward, Phase::kForward}));
  EXPECT_FALSE(RankContext::current().is_recomputing);
}

TEST(Recompute, HooksOfParametersRunInItsBackward) {
  const Tensor w = leaf_of({3}, {1}), x = leaf_of({2}, {1});
  int calls = 0, ends = 0;
  w.add_accumulate_hook([&](Tensor&) {
    ++calls;
    autograd::at_end_of_backward([&] {
      ++ends;
      EXPECT_TRUE(x.grad().defined());  // the outer backward, not the inner
    });
  });
  sum(recompute([&](const Tensors& in) { return Tensors{mul(in[0], w)}; },
                {x})[0])
      .backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(ends, 1);
}

TEST(Recompute, KeepsOnlyTheInput) {
  const OwnDevice own;
  const Body body = [](const Tensors& in) {
    return Tensors{exp(exp(exp(scale(in[0], 0.1))))};
  };
  auto kept = [&](bool again) {
    const std::int64_t before = own.device.memory().current_total;
    const Tensor x = leaf({1000});
    const Tensor y = again ? recompute(body, {x})[0] : body({x})[0];
    return own.device.memory().current_total - before;
  };
  EXPECT_EQ(kept(false), 4 * 8000);  // x and three outputs
  EXPECT_EQ(kept(true), 2 * 8000);   // x and the last
}

TEST(Recompute, BooksTheGradientOfItsInputAsActivation) {
  const OwnDevice own;
  Tensor w;
  {
    MemoryScope kind(MemoryKind::kParameter);
    w = leaf({10, 10});
  }
  Tensor h = matmul(noise({50, 10}), w);
  h = recompute(
      [&](const Tensors& in) { return Tensors{tanh(matmul(in[0], w))}; },
      {h})[0];
  sum(h).backward();
  // One gradient of w in the block and one before it, until they are added.
  EXPECT_LE(own.device.memory().peak(MemoryKind::kGradient), 2 * 800);
}

TEST(Recompute, ARetainedGraphRunsAgain) {
  const Tensor x = leaf_of({3}, {1});
  const Tensor y = sum(recompute(
      [](const Tensors& in) { return Tensors{square(in[0])}; }, {x})[0]);
  autograd::backward({y}, {}, /*retain_graph=*/true);
  y.backward();
  EXPECT_EQ(x.grad().item(), 12);
}

TEST(Recompute, AnErrorInTheSecondRunReachesTheCaller) {
  const Tensor x = leaf({2});
  const Tensor y = recompute(
      [](const Tensors& in) {
        SB_CHECK(!RankContext::current().is_recomputing, "on purpose");
        return Tensors{square(in[0])};
      },
      {x})[0];
  expect_error([&] { sum(y).backward(); }, {"on purpose"});
  EXPECT_FALSE(RankContext::current().is_recomputing);
}

TEST(Recompute, BatchNormCountsABatchOnce) {
  auto run_once = [](bool again) {
    BatchNorm norm(3, f64_init());
    const Tensor x = leaf({8, 2, 3});
    const Body body = [&](const Tensors& in) { return Tensors{norm(in[0])}; };
    weighted_sum(run(body, {x}, again)[0]).backward();
    return Tensors{norm.running_mean, norm.running_var, norm.weight.grad(),
                   norm.bias.grad(), x.grad()};
  };
  expect_same_bits(run_once(false), run_once(true));
}

}  // namespace
}  // namespace shardbook
