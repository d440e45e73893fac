// Deferred weight gradients.

#include "core/weight_gradients.h"

#include <gtest/gtest.h>

#include "core/module.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

Tensor weight(const Shape& shape, std::uint64_t seed) {
  InitOptions init;
  init.seed = seed;
  init.dtype = DType::kF32;
  return make_parameter("w", shape, 1, init);
}

Tensor input(std::uint64_t seed) { return leaf({5, 4}, seed, -1, 1, kOfF32); }

struct Model {
  Tensor w1 = weight({4, 6}, 1), b1 = weight({6}, 2), w2 = weight({6, 4}, 3);
  Tensor table = weight({7, 4}, 4);

  /// `table` is used twice, like tied embeddings.
  Tensor loss(const Tensor& x) const {
    const Tensor tokens =
        Tensor::from_values<std::int64_t>({1, 6, 1, 0, 3}, {5});
    const Tensor in = add(x, embedding(table, tokens));
    const Tensor out = linear(relu(linear(in, w1, b1)), w2, Tensor());
    return weighted_sum(matmul(out, table, false, true));
  }
  Tensors all() const { return {w1, b1, w2, table}; }
};

TEST(WeightGradientsTest, WaitAndAreTheSameBits) {
  const Deterministic deterministic;
  const Model now, later;
  WeightGradients store;
  for (const std::uint64_t batch : {11, 12, 13}) {
    const Tensor x = input(batch), y = input(batch);
    autograd::backward({now.loss(x)});
    {
      const DeferWeightGradients scope(store);
      autograd::backward({later.loss(y)});
    }
    store.flush();
    EXPECT_TRUE(bitwise_equal(x.grad(), y.grad()));
  }
  // Biases are cheap, weights are deferred
  EXPECT_TRUE(bitwise_equal(now.b1.grad(), later.b1.grad()));
  EXPECT_FALSE(later.w1.grad().defined());
  EXPECT_EQ(store.size(), 3u);
  while (!store.empty()) store.pop();
  expect_same_bits(gradients_of(now.all()), gradients_of(later.all()));
}

TEST(WeightGradientsTest, HooksRunWhenAWeightIsAccumulated) {
  const Model model;
  int hooks = 0;
  model.table.add_accumulate_hook([&](Tensor&) { ++hooks; });
  WeightGradients store;
  {
    const DeferWeightGradients scope(store);
    autograd::backward({model.loss(input(1))});
  }
  EXPECT_EQ(hooks, 0);
  store.flush();
  store.pop();
  EXPECT_EQ(hooks, 1);
}

// A leaf booked as an activation is a stage's input: its sender waits.
TEST(WeightGradientsTest, InputsNeverWait) {
  const Tensor a = input(1), b = leaf({4, 3}, 2, -1, 1, kOfF32);
  WeightGradients store;
  const DeferWeightGradients scope(store);
  autograd::backward({sum(matmul(a, b))});
  EXPECT_TRUE(a.grad().defined());
  EXPECT_TRUE(b.grad().defined());
  EXPECT_TRUE(store.empty());
}

TEST(WeightGradientsTest, ListsMayBeEmptyAndPopNeedsOne) {
  WeightGradients store;
  store.flush();
  EXPECT_FALSE(store.empty());
  store.pop();
  EXPECT_TRUE(store.empty());
  expect_error([&] { store.pop(); }, {"no micro-batch waits"});
}

// Each entry of the list frees its tensors once it is computed.
TEST(WeightGradientsTest, FreeWhatTheyKept) {
  const Device device = RankContext::current().device;
  const auto activations = [&] {
    return device.memory().current(MemoryKind::kActivation);
  };
  const Model model;
  const std::int64_t before = activations();
  WeightGradients store;
  {
    const DeferWeightGradients scope(store);
    autograd::backward({model.loss(input(1))});
  }
  store.flush();
  EXPECT_GT(activations(), before);
  store.pop();
  EXPECT_EQ(activations(), before);
}

}  // namespace
}  // namespace shardbook
