// The tape's entry points for callers: hooks, gradient buffers, own functions.

#include "core/autograd.h"

#include <cmath>
#include <utility>

#include "core/tensor_storage.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

using autograd::backward;
using autograd::custom_function;

TEST(Hooks, RunAfterAccumulationInReverseOrderOfUse) {
  const Tensor a = leaf_of({2}, {1}), b = leaf_of({3}, {1}),
               c = leaf_of({4}, {1});
  std::vector<std::string> order;
  auto watch = [&](const Tensor& parameter, const std::string& name) {
    parameter.add_accumulate_hook([&order, name](Tensor& p) {
      EXPECT_TRUE(p.grad().defined());
      order.push_back(name + " " +
                      std::to_string(static_cast<int>(p.grad().item())));
    });
  };
  watch(a, "a");
  watch(b, "b");
  watch(c, "c");
  sum(mul(mul(a, b), c)).backward();
  // a and b become final together, and come in the order of the operands.
  EXPECT_EQ(order, (std::vector<std::string>{"c 6", "a 12", "b 8"}));
}

TEST(Hooks, RunOncePerBackwardWhenAParameterIsUsedTwice) {
  const Tensor w = leaf_of({2}, {1});
  int calls = 0;
  double seen = 0;
  w.add_accumulate_hook([&](Tensor& p) {
    ++calls;
    seen = p.grad().item();
  });
  sum(mul(square(w), w)).backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(seen, 12);  // complete, not a part of it
}

TEST(Hooks, SeeEveryLayersGradientBeforeEarlierLayersRun) {
  std::vector<std::string> order;
  const Tensor w1 = leaf({2}), w2 = leaf({2}), x = leaf({2});
  for (const auto& [w, name] : {std::pair(w1, "hook w1"), {w2, "hook w2"}}) {
    w.add_accumulate_hook(
        [&order, name = std::string(name)](Tensor&) { order.push_back(name); });
  }
  Tensor y = noted(mul(x, w1), "layer 1", &order);
  y = noted(mul(y, w2), "layer 2", &order);
  sum(y).backward();
  EXPECT_EQ(order, (std::vector<std::string>{"layer 2", "hook w2", "layer 1",
                                             "hook w1"}));
}

TEST(Hooks, CanBeRemovedEvenByThemselves) {
  const Tensor w = leaf({1});
  int calls = 0;
  int key = -1;
  key = w.add_accumulate_hook([&](Tensor& p) {
    ++calls;
    p.remove_accumulate_hook(key);
  });
  const int other = w.add_accumulate_hook([&](Tensor&) { calls += 10; });
  EXPECT_NE(key, other);
  sum(w).backward();
  EXPECT_EQ(calls, 11);
  sum(w).backward();
  EXPECT_EQ(calls, 21);
  expect_error([&] { square(w).add_accumulate_hook([](Tensor&) {}); },
               {"only leaves"});
}

TEST(Hooks, OnResultsSeeAndReplaceTheCompleteGradient) {
  const Tensor x = leaf_of({2}, {1});
  const Tensor y = square(x);
  double seen = 0;
  y.add_grad_hook([&](const Tensor& grad) {
    seen = grad.item();
    return scale(grad, 10);
  });
  sum(add(y, scale(y, 3))).backward();
  EXPECT_EQ(seen, 4);
  EXPECT_EQ(x.grad().item(), 160);
  // A hook that returns an undefined tensor changes nothing.
  x.clear_grad();
  const Tensor z = square(x);
  z.add_grad_hook([](const Tensor&) { return Tensor(); });
  sum(z).backward();
  EXPECT_EQ(x.grad().item(), 4);
  expect_error([&] { x.add_grad_hook([](const Tensor& g) { return g; }); },
               {"add_accumulate_hook"});
}

TEST(GradBuffers, ReceiveTheFirstGradientAndTheSum) {
  const Tensor bucket = Tensor::full({5}, 99, kOfF64);
  const Tensor a = leaf_of({1, 2}, {2}), b = leaf_of({3, 4, 5}, {3});
  set_grad_buffer(a, bucket.flat_view(3, {2}));
  set_grad_buffer(b, bucket.flat_view(0, {3}));
  backward({square(a), square(b)}, {ones_like(a), ones_like(b)});
  EXPECT_EQ(values(bucket), (std::vector<double>{6, 8, 10, 2, 4}));
  EXPECT_TRUE(a.grad().shares_storage(bucket));
  backward({a}, {ones_like(a)});
  EXPECT_EQ(values(bucket), (std::vector<double>{6, 8, 10, 3, 5}));
  // Cleared is not zeroed: the next gradient overwrites.
  a.clear_grad();
  EXPECT_EQ(bucket.data<double>()[3], 3);
  backward({a}, {ones_like(a)});
  EXPECT_EQ(values(bucket), (std::vector<double>{6, 8, 10, 1, 1}));
  expect_error([&] { set_grad_buffer(a, bucket); }, {"[5]", "[2]"});
}

// Mixed precision: 16-bit parameters, sums of gradients in f32.
TEST(GradBuffers, MayBeWiderThanTheParameter) {
  const Tensor w = Tensor::full({33}, 1, kOfBF16).set_requires_grad();
  const Tensor bucket = Tensor::zeros({33});
  set_grad_buffer(w, bucket);
  // 1 + 2^-9 has no place in kOfBF16, their sum in f32 has.
  backward({w}, {Tensor::full({33}, 1, kOfBF16)});
  backward({w}, {Tensor::full({33}, 1.0 / 512, kOfBF16)});
  EXPECT_EQ(w.grad().dtype(), DType::kF32);
  EXPECT_EQ(values(bucket), std::vector<double>(33, 1 + 1.0 / 512));
}

TEST(CustomFunction, HasItsOwnBackward) {
  const Tensor x = leaf_of({3}, {1});
  // Straight-through: forward rounds, backward does not.
  const Tensor y = custom_function(
      "round", {x},
      [](const Tensors& in) {
        EXPECT_FALSE(RankContext::current().grad_enabled);
        return Tensors{
            Tensor::full({1}, std::round(in[0].item() / 2), in[0].options())};
      },
      [](const Tensors& grads) { return Tensors{scale(grads[0], 7)}; })[0];
  EXPECT_EQ(y.item(), 2);
  sum(y).backward();
  EXPECT_EQ(x.grad().item(), 7);
}

TEST(CustomFunction, OutputsThatNobodyUsesHaveUndefinedGradients) {
  const Tensor x = leaf_of({1, 2}, {2});
  bool first = true, second = false;
  const Tensors y = custom_function(
      "pair", {x},
      [](const Tensors& in) {
        return Tensors{scale(in[0], 1), in[0]};
      },
      [&](const Tensors& grads) {
        first = grads[0].defined();
        second = grads[1].defined();
        return Tensors{grads[1]};
      });
  sum(y[1]).backward();
  EXPECT_FALSE(first);
  EXPECT_TRUE(second);
  EXPECT_EQ(values(x.grad()), (std::vector<double>{1, 1}));
}

TEST(CustomFunction, MayReturnItsInput) {
  const Tensor x = leaf_of({1, 2}, {2});
  const Tensor y = with_backward(
      x, [](const Tensors& grads) { return Tensors{scale(grads[0], 2)}; });
  EXPECT_TRUE(x.is_leaf());
  EXPECT_FALSE(y.is_leaf());
  EXPECT_TRUE(y.shares_storage(x));
  sum(y).backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{2, 2}));
}

TEST(CustomFunction, UndefinedGradientsStopTheFlow) {
  const Tensor x = leaf({2}), w = leaf({2});
  int hooks = 0;
  x.add_accumulate_hook([&](Tensor&) { ++hooks; });
  const Tensor y = custom_function(
      "stop", {square(x), w},
      [](const Tensors& in) { return Tensors{add(in[0], in[1])}; },
      [](const Tensors& grads) {
        return Tensors{Tensor(), grads[0]};
      })[0];
  sum(y).backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_EQ(hooks, 0);
  EXPECT_EQ(values(w.grad()), (std::vector<double>{1, 1}));
}

TEST(CustomFunction, GradientsThatDoNotFitAreErrors) {
  const auto in_f32 = [](const Tensors& grads) {
    return Tensors{to_dtype(grads[0], DType::kF32)};
  };
  const auto of_the_sum = [](const Tensor& x) {
    return custom_function(
        "of_the_sum", {x},
        [](const Tensors& in) { return Tensors{sum(in[0])}; },
        [](const Tensors& grads) { return grads; })[0];
  };
  const Tensor x = leaf({200}), w = leaf({200});
  const Tensor both = custom_function(
      "one_of_two", {x, w},
      [](const Tensors& in) { return Tensors{add(in[0], in[1])}; },
      [](const Tensors& grads) { return grads; })[0];
  expect_error([&] { sum(both).backward(); },
               {"'one_of_two'", "1 gradients for 2 inputs"});
  // Even if broadcasting would hide the error
  for (const Tensor& in : {x, square(x)}) {
    expect_error([&] { of_the_sum(in).backward(); }, {"[]", "[200]"});
  }
  expect_error(
      [&] { sum(add(with_backward(square(x), in_f32), x)).backward(); },
      {"f32", "f64"});
  expect_error([&] { sum(add(x, with_backward(x, in_f32))).backward(); },
               {"f32", "f64"});
}

// Order without data: an edge that carries an empty tensor.
TEST(CustomFunction, PhonyEdgesOrderTheBackward) {
  std::vector<std::string> order;
  const Tensor x = leaf_of({2}, {1}), w = leaf_of({3}, {1});
  // Without the edge, "late" (made second) would run first.
  const Tensor early_in = noted(x, "early", &order);
  const Tensors fork = custom_function(
      "fork", {early_in},
      [](const Tensors& in) {
        return Tensors{in[0], Tensor::empty({0}, in[0].options())};
      },
      [&](const Tensors& grads) {
        order.push_back("fork");
        return Tensors{grads[0]};
      });
  const Tensor joined = custom_function(
      "join", {w, fork[1]}, [](const Tensors& in) { return Tensors{in[0]}; },
      [&](const Tensors& grads) {
        order.push_back("join");
        return Tensors{grads[0], Tensor::empty({0}, grads[0].options())};
      })[0];
  backward({fork[0], joined}, {ones_like(x), ones_like(w)});
  EXPECT_EQ(order, (std::vector<std::string>{"join", "fork", "early"}));
  EXPECT_EQ(x.grad().item(), 1);
  EXPECT_EQ(w.grad().item(), 1);
}

}  // namespace
}  // namespace shardbook
