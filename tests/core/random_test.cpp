// Random numbers by global position, and sums in a fixed order.

#include <utility>

#include "core/context.h"
#include "core/layers.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

TEST(Filling, FlatPiecesOfAParameterAreShards) {
  // A flat shard of [6, 14], elements 11 to 40, as ZeRO cuts it.
  const Tensor whole = Tensor::empty({6, 14}), part = Tensor::empty({30});
  fill_normal(whole, 42, stream_of("w"), 0.5, 2);
  fill_normal(part, 42, stream_of("w"), 0.5, 2, {{84}, {11}, {1}});
  EXPECT_TRUE(bitwise_equal(part, whole.flat_view(11, {30})));
}

TEST(Filling, DependsOnSeedStreamAndNothingElse) {
  auto draw = [](std::uint64_t seed, const std::string& name) {
    const Tensor x = Tensor::empty({100}, kOfF64);
    fill_normal(x, seed, stream_of(name), 0, 1);
    return x;
  };
  const Tensor first = draw(1, "a");
  RankContext::current().random = {99, 98, 97, {96, 95}};
  EXPECT_TRUE(bitwise_equal(draw(1, "a"), first));
  RankContext::current().random = {};
  EXPECT_FALSE(bitwise_equal(draw(2, "a"), first));
  EXPECT_FALSE(bitwise_equal(draw(1, "b"), first));
}

TEST(Initialisation, LinearLayersBeginAsNamed) {
  InitOptions init;
  init.seed = 4;
  const Linear a("fc1", 9, 4, init), again("fc1", 9, 4, init),
      other("fc2", 9, 4, init);
  EXPECT_TRUE(bitwise_equal(a.weight, again.weight));
  EXPECT_FALSE(bitwise_equal(a.weight, other.weight));
  for (double v : values(a.weight)) EXPECT_LE(std::fabs(v), 1.0 / 3);
  // Rank 1 of a column-parallel pair draws only its own two columns.
  const Tensor half = Tensor::empty({9, 2});
  fill_uniform(half, init.seed, stream_of("fc1.weight"), -1.0 / 3, 1.0 / 3,
               {{9, 4}, {0, 2}, {1, 1}});
  EXPECT_TRUE(bitwise_equal(half, slice(a.weight, 1, 2, 4).detach()));
}

/// `body` under a random state whose batch lies at `slice`.
Tensor drawn(BatchSlice slice, const std::function<Tensor()>& body) {
  ContextValue<RandomState> state(&RankContext::random,
                                  RandomState{5, 2, 0, slice});
  return body();
}

/// Rows first, first + stride, ... of dim 0.
Tensor rows_of(const Tensor& x, BatchSlice at, std::int64_t count) {
  Tensors rows;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = at.first + i * at.stride;
    rows.push_back(slice(x, 0, row, row + 1));
  }
  return concat(rows, 0);
}

TEST(Dropout, OfABatchSliceEqualsTheRowsOfTheGlobalBatch) {
  const Tensor x = noise({8, 3, 5}, 1, 0.5, 1);
  auto forward = [](const Tensor& in) {
    return dropout(dropout(in, 0.5), 0.3);
  };
  const Tensor whole = drawn({0, 1}, [&] { return forward(x); });
  for (const auto& [at, count] : std::vector<std::pair<BatchSlice, int>>{
           {{0, 1}, 8}, {{4, 1}, 4}, {{1, 2}, 4}, {{2, 3}, 2}, {{7, 1}, 1}}) {
    const Tensor mine = rows_of(x, at, count);
    EXPECT_TRUE(bitwise_equal(drawn(at, [&] { return forward(mine); }),
                              rows_of(whole, at, count)));
  }
  // Counterexample: a rank that ignores its place draws rank 0's masks.
  EXPECT_FALSE(bitwise_equal(drawn({0, 1},
                                   [&] {
                                     return forward(rows_of(x, {4, 1}, 4));
                                   }),
                             rows_of(whole, {4, 1}, 4)));
}

TEST(Dropout, OfAttentionEqualsTheRowsOfTheGlobalBatch) {
  const AttentionOptions options = attention_of(2, true, 0.4);
  Deterministic deterministic;
  const Tensor qkv = leaf({6, 5, 12});
  const Tensor whole = drawn({0, 1}, [&] { return attention(qkv, options); });
  autograd::backward({whole}, {Tensor::full({6, 5, 4}, 1, whole.options())});
  const BatchSlice at{1, 2};
  const Tensor mine = rows_of(qkv, at, 3).detach().set_requires_grad();
  const Tensor part = drawn(at, [&] { return attention(mine, options); });
  EXPECT_TRUE(bitwise_equal(part.detach(), rows_of(whole, at, 3).detach()));
  autograd::backward({part}, {Tensor::full({3, 5, 4}, 1, whole.options())});
  EXPECT_TRUE(bitwise_equal(mine.grad(), rows_of(qkv.grad(), at, 3)));
}

/// The elements of a tensor that a shard has.
struct Part {
  const char* name;
  Shape shape;
  std::vector<std::int64_t> offset, step;
};

// Sequence, rows, columns, or the first and last of four pieces of a sequence:
// dim 1 of [4, 4, 2, 6] counts the pieces.
TEST(Dropout, OfAShardEqualsThatPartOfOneDevicesTensor) {
  const Shape global = {4, 4, 2, 6};
  const Tensor x = noise(global, 1, 0.5, 1);
  const BatchSlice batch{3, 2};
  const Tensor whole = drawn(batch, [&] { return dropout(x, 0.5); });
  for (const Part& part :
       {Part{"sequence", {4, 2, 2, 6}, {0, 2, 0, 0}, {}},
        Part{"rows", {2, 4, 2, 6}, {2, 0, 0, 0}, {}},
        Part{"columns", {4, 4, 2, 3}, {0, 0, 0, 3}, {}},
        Part{"every second row", {2, 4, 2, 6}, {1, 0, 0, 0}, {2, 1, 1, 1}},
        Part{"both ends", {4, 2, 2, 6}, {}, {1, 3, 1, 1}}}) {
    const auto part_of = [&](const Tensor& tensor) {
      Tensor result = tensor;
      for (std::size_t d = 0; d < 4; ++d) {
        const std::int64_t first = part.offset.empty() ? 0 : part.offset[d];
        const std::int64_t stride = part.step.empty() ? 1 : part.step[d];
        Tensors slices;
        for (std::int64_t i = 0; i < part.shape[d]; ++i) {
          const std::int64_t at = first + i * stride;
          slices.push_back(
              slice(result, static_cast<std::int64_t>(d), at, at + 1));
        }
        result = concat(slices, static_cast<std::int64_t>(d));
      }
      return result;
    };
    const Tensor mine = part_of(x).detach().set_requires_grad();
    const Tensor y = drawn(batch, [&] {
      return dropout(mine, 0.5, {global, part.offset, part.step});
    });
    EXPECT_TRUE(bitwise_equal(y.detach(), part_of(whole).detach()))
        << part.name;
    // The gradient passes through the same mask: y = x * gradient
    autograd::backward({y}, {Tensor::full(part.shape, 1, y.options())});
    EXPECT_TRUE(bitwise_equal(mul(mine.detach(), mine.grad()), y.detach()))
        << part.name;
  }
  expect_error(
      [&] {
        dropout(x, 0.5, {{4, 4}, {}, {}});
      },
      {"[4, 4, 2, 6]", "[4, 4]", "one per dim"});
}

TEST(Dropout, OfAShardOfHeadsEqualsTheirPartOfOneDevicesHeads) {
  const AttentionOptions options = attention_of(4, true, 0.4);
  Deterministic deterministic;
  const Tensor qkv = noise({2, 5, 24}, 1, -1, 1);
  const Tensor whole = drawn({1, 3}, [&] { return attention(qkv, options); });
  for (std::int64_t index = 0; index < 2; ++index) {
    // Queries, keys and values: two of four heads of each
    const Tensor mine =
        reshape(slice(reshape(qkv, {2, 5, 3, 8}), 3, 4 * index, 4 * index + 4),
                {2, 5, 12});
    AttentionOptions half = options;
    half.heads = 2;
    half.shard = {{2, 4, 5, 5}, {0, 2 * index, 0, 0}, {}};
    const Tensor part = drawn({1, 3}, [&] { return attention(mine, half); });
    EXPECT_TRUE(bitwise_equal(part, slice(whole, 2, 4 * index, 4 * index + 4)));
  }
}

TEST(Dropout, DependsOnStepOperationAndSeed) {
  const Tensor x = Tensor::full({200}, 1);
  auto with = [&](RandomState state) {
    ContextValue<RandomState> scope(&RankContext::random, state);
    return dropout(x, 0.5);
  };
  const Tensor base = with({1, 1, 1, {}});
  EXPECT_TRUE(bitwise_equal(with({1, 1, 1, {}}), base));
  EXPECT_FALSE(bitwise_equal(with({2, 1, 1, {}}), base));
  EXPECT_FALSE(bitwise_equal(with({1, 2, 1, {}}), base));
  EXPECT_FALSE(bitwise_equal(with({1, 1, 2, {}}), base));
  RandomState& random = RankContext::current().random;
  const std::uint64_t before = random.next_op;
  dropout(x, 0.5);
  EXPECT_EQ(random.next_op, before + 1);
  dropout(x, 0);  // the identity draws nothing
  EXPECT_EQ(random.next_op, before + 1);
}

TEST(Dropout, KeepsTheMean) {
  const Tensor x = Tensor::full({100000}, 1, kOfF64);
  EXPECT_NEAR(mean(dropout(x, 0.25)).item(), 1, 0.008);
  EXPECT_TRUE(dropout(x, 0).is_same(x));
  expect_error([&] { dropout(x, 1); }, {"1", "below 1"});
  expect_error([&] { dropout(x, -0.1); }, {"-0.1"});
}

/// A small network with every kind of sum in it; output and gradients.
Tensors network(const Tensor& tokens, const Tensor& targets, DType dtype) {
  RandomState& random = RankContext::current().random;
  random = RandomState{1, 2, 0, {}};
  const TensorOptions like{dtype, Device()};
  const Tensor table = leaf({50, 48}, 1, -1, 1, like);
  const Tensor w = leaf({48, 144}, 2, -0.2, 0.2, like);
  const Tensor b = leaf({144}, 3, -1, 1, like);
  const Tensor g = leaf({48}, 4, 0.5, 1.5, like);
  const Tensor be = leaf({48}, 5, -1, 1, like);
  const AttentionOptions options = attention_of(4, true, 0.1);
  Tensor h = layer_norm(embedding(table, tokens), g, be);
  h = add(h, dropout(attention(linear(h, w, b), options), 0.1));
  h = batch_norm_train(reshape(h, {-1, 48}), g, be, {}).y;
  const Tensor logits = matmul(h, table, false, true);
  const Tensor loss = cross_entropy(logits, targets);
  loss.backward();
  return {loss.detach(), logits.detach(), table.grad(), w.grad(),
          b.grad(),      g.grad(),        be.grad()};
}

TEST(Threads, TheirNumberDoesNotChangeABit) {
  std::vector<std::int64_t> ids;
  for (int i = 0; i < 8 * 65; ++i) ids.push_back((i * 7919) % 50);
  const Tensor tokens = Tensor::from_values(ids, {8, 65});
  const Tensor targets = Tensor::from_values(ids, {8 * 65});
  for (const auto& [dtype, deterministic] : {std::pair(DType::kF32, false),
                                             {DType::kF32, true},
                                             {DType::kF64, true},
                                             {DType::kBF16, true},
                                             {DType::kF16, true}}) {
    auto with_threads = [&, dtype = dtype,
                         is_fixed = deterministic](int threads) {
      RankContext context(Device::cpu(), 0, threads);
      RankContext::Scope scope(context);
      Deterministic mode(is_fixed);
      return network(to_device(tokens, context.device),
                     to_device(targets, context.device), dtype);
    };
    const Tensors one = with_threads(1);
    for (int threads : {2, 3, 4}) {
      const Tensors many = with_threads(threads);
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(bitwise_equal(one[i], many[i]))
            << dtype_name(dtype) << ", " << threads << " threads, result " << i
            << (deterministic ? ", deterministic" : "");
      }
    }
  }
}

TEST(DeterministicMode, LinearLayersAreCutAnywhere) {
  Deterministic deterministic;
  const Tensor x = noise({24, 40}, 1, -1, 1, kOfF32);
  const Tensor w = noise({40, 36}, 2, -1, 1, kOfF32);
  const Tensor b = noise({36}, 3, -1, 1, kOfF32);
  const Tensor whole = linear(x, w, b);
  EXPECT_TRUE(
      bitwise_equal(linear(slice(x, 0, 5, 11), w, b), slice(whole, 0, 5, 11)));
  EXPECT_TRUE(bitwise_equal(linear(x, slice(w, 1, 9, 18), slice(b, 0, 9, 18)),
                            slice(whole, 1, 9, 18)));
}

TEST(DeterministicMode, ABlockOfRowsIsIndependentOfTheOthers) {
  Deterministic deterministic;
  const Tensor x = noise({6, 9, 24}, 1, -1, 1, kOfF32);
  const Tensor g = noise({24}, 2, 0.5, 1, kOfF32),
               b = noise({24}, 3, -1, 1, kOfF32);
  const AttentionOptions options = attention_of(2);
  auto rows = [&](const Tensor& in) {
    return attention(softmax(gelu(layer_norm(in, g, b))), options);
  };
  const Tensor whole = rows(x);
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(
        bitwise_equal(rows(slice(x, 0, i, i + 1)), slice(whole, 0, i, i + 1)));
  }
}

}  // namespace
}  // namespace shardbook
