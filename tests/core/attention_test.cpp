// Fused attention against attention composed of small operations.

#include <array>

#include "tests/core/support.h"

namespace shardbook {
namespace {

struct Setting {
  std::int64_t batch, q_rows, k_rows, heads, head_dim;
  bool causal;
  double dropout, scale;
};

/// softmax(scale Q K^T + mask), dropout, times V, head by head.
Tensor composed(const Tensor& q, const Tensor& k, const Tensor& v,
                const Setting& s) {
  const std::int64_t h = s.heads * s.head_dim;
  auto by_heads = [&](const Tensor& x, std::int64_t rows) {
    return reshape(
        permute(reshape(x, {s.batch, rows, s.heads, s.head_dim}), {0, 2, 1, 3}),
        {s.batch * s.heads, rows, s.head_dim});
  };
  Tensor scores =
      matmul(by_heads(q, s.q_rows), by_heads(k, s.k_rows), false, true);
  scores =
      scale(scores, s.scale != 0 ? s.scale : 1 / std::sqrt(double(s.head_dim)));
  if (s.causal) {
    std::vector<double> mask;
    for (std::int64_t i = 0; i < s.q_rows; ++i) {
      for (std::int64_t j = 0; j < s.k_rows; ++j) {
        mask.push_back(j > i ? -1e30 : 0);
      }
    }
    scores =
        add(scores, Tensor::from_values<double>(mask, {s.q_rows, s.k_rows}));
  }
  Tensor p = reshape(softmax(scores), {s.batch, s.heads, s.q_rows, s.k_rows});
  p = reshape(dropout(p, s.dropout), {s.batch * s.heads, s.q_rows, s.k_rows});
  const Tensor out = matmul(p, by_heads(v, s.k_rows));
  return reshape(permute(reshape(out, {s.batch, s.heads, s.q_rows, s.head_dim}),
                         {0, 2, 1, 3}),
                 {s.batch, s.q_rows, h});
}

AttentionOptions options_of(const Setting& s) {
  AttentionOptions options = attention_of(s.heads, s.causal, s.dropout);
  options.scale = s.scale;
  return options;
}

const std::vector<Setting>& settings() {
  static const std::vector<Setting> kAll = {
      {2, 7, 7, 3, 5, true, 0, 0},     {2, 7, 7, 3, 5, false, 0, 0},
      {1, 70, 70, 2, 8, true, 0, 0},   {2, 33, 33, 1, 4, true, 0.3, 0},
      {2, 5, 9, 2, 4, false, 0, 0},    {2, 9, 5, 2, 4, false, 0.25, 0.7},
      {3, 1, 1, 2, 3, true, 0, 0},     {1, 66, 130, 2, 4, false, 0.1, 0},
      {1, 20, 600, 1, 5, false, 0, 0},  // several blocks of keys
  };
  return kAll;
}

void with_same_draws(const std::function<void()>& body) {
  ContextValue<RandomState> state(&RankContext::random,
                                  RandomState{3, 1, 0, {2, 3}});
  body();
}

TEST(Attention, EqualsTheComposedOneWithItsGradients) {
  const std::pair<DType, double> dtypes[] = {{DType::kF64, 1e-12},
                                             {DType::kF32, 1e-4},
                                             {DType::kF16, 3e-2},
                                             {DType::kBF16, 0.1}};
  for (const auto& [dtype, tolerance] : dtypes) {
    for (const Setting& s : settings()) {
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ", " << s.q_rows
                                      << " x " << s.k_rows);
      const std::int64_t h = s.heads * s.head_dim;
      // Both start from values that are exact in the narrow dtype.
      const auto operand = [&](std::int64_t rows, std::uint64_t seed) {
        return noise({s.batch, rows, h}, seed, -2, 2, {dtype, Device()});
      };
      const Tensors narrow = {operand(s.q_rows, 1), operand(s.k_rows, 2),
                              operand(s.k_rows, 3)};
      auto run = [&](bool fused) {
        Tensors x;
        for (const Tensor& operand : narrow) {
          x.push_back(to_dtype(operand, fused ? dtype : DType::kF64)
                          .clone()
                          .set_requires_grad());
        }
        Tensor out;
        with_same_draws([&] {
          out = fused ? attention(x[0], x[1], x[2], options_of(s))
                      : composed(x[0], x[1], x[2], s);
        });
        weighted_sum(out).backward();
        return Tensors{out.detach(), x[0].grad(), x[1].grad(), x[2].grad()};
      };
      expect_close(run(true), run(false), tolerance);
    }
  }
}

TEST(Attention, PackedEqualsSeparate) {
  for (const Setting& s : settings()) {
    if (s.q_rows != s.k_rows) continue;
    const std::int64_t h = s.heads * s.head_dim;
    const Tensor q = leaf({s.batch, s.q_rows, h}, 1),
                 k = leaf({s.batch, s.q_rows, h}, 2),
                 v = leaf({s.batch, s.q_rows, h}, 3);
    const Tensor packed = concat({q, k, v}, 2).detach().set_requires_grad();
    with_same_draws(
        [&] { weighted_sum(attention(q, k, v, options_of(s))).backward(); });
    with_same_draws(
        [&] { weighted_sum(attention(packed, options_of(s))).backward(); });
    expect_close(packed.grad(), concat({q.grad(), k.grad(), v.grad()}, 2),
                 1e-14);
  }
}

// Head widths of small and of published models; rows of heads * d columns, which
// need not be what the model is wide.
TEST(Attention, PackedGroupsEqualSharedKeysThatAreRepeated) {
  const std::pair<DType, double> dtypes[] = {{DType::kF64, 1e-12},
                                             {DType::kF32, 1e-4},
                                             {DType::kF16, 3e-2},
                                             {DType::kBF16, 0.1}};
  constexpr std::int64_t kBatch = 2, kRows = 11;
  for (const auto& [dtype, tolerance] : dtypes) {
    for (const auto& [heads, kv_heads, dim] :
         {std::array<std::int64_t, 3>{4, 2, 16},
          {6, 2, 5},
          {3, 1, 64},
          {2, 1, 80},
          {2, 1, 96},
          {4, 2, 128}}) {
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ", " << heads
                                      << " heads of " << dim);
      AttentionOptions options = attention_of(heads);
      options.kv_heads = kv_heads;
      const Tensor qkv = noise({kBatch, kRows, (heads + 2 * kv_heads) * dim}, 1,
                               -1, 1, {dtype, Device()});
      const Tensor packed = qkv.clone().set_requires_grad();
      const Tensor out = attention(packed, options);
      EXPECT_EQ(out.shape(), (Shape{kBatch, kRows, heads * dim}));
      weighted_sum(out).backward();

      // In f64, with each head of keys as often as heads of queries share it
      const Tensor wide = to_dtype(qkv, DType::kF64).set_requires_grad();
      const auto heads_at = [&](std::int64_t first, bool repeat) {
        Tensors parts;
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t at =
              first + (repeat ? h / (heads / kv_heads) : h) * dim;
          parts.push_back(slice(wide, 2, at, at + dim));
        }
        return concat(parts, 2);
      };
      const Tensor expected =
          composed(heads_at(0, false), heads_at(heads * dim, true),
                   heads_at((heads + kv_heads) * dim, true),
                   {kBatch, kRows, kRows, heads, dim, /*causal=*/true, 0, 0});
      weighted_sum(expected).backward();
      expect_close(Tensors{out.detach(), packed.grad()},
                   {expected.detach(), wide.grad()}, tolerance);
    }
  }
}

// Latent attention: heads of values are narrower than those of queries, or wider.
// Zero columns on the narrower side change nothing.
TEST(Attention, ValuesMayHaveAWidthOfTheirOwn) {
  if (RankContext::current().device.is_cuda()) {
    AttentionOptions own = attention_of(2);
    own.value_dim = 8;
    expect_error(
        [&] {
          attention(Tensor::zeros({1, 2, 2 * (4 + 4 + 8)}), own);
        },
        {"attention: values of 8 columns and queries of 4 on a GPU"});
    return;
  }
  const std::pair<DType, double> dtypes[] = {
      {DType::kF64, 1e-12}, {DType::kF32, 1e-4}, {DType::kBF16, 0.1}};
  constexpr std::int64_t kBatch = 2, kRows = 300;  // two blocks of keys
  for (const auto& [dtype, tolerance] : dtypes) {
    for (const auto& [heads, kv_heads, dim, values] :
         {std::array<std::int64_t, 4>{3, 3, 12, 8},
          {4, 2, 5, 17},
          {2, 2, 48, 32},
          {2, 1, 8, 24}}) {
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ", heads of "
                                      << dim << " and " << values);
      const std::int64_t most = std::max(dim, values);
      AttentionOptions options = attention_of(heads);
      options.kv_heads = kv_heads;
      options.scale = 0.3;
      AttentionOptions own = options;
      own.value_dim = values;
      const std::int64_t keys = (heads + kv_heads) * dim;
      const Tensor qkv = noise({kBatch, kRows, keys + kv_heads * values}, 1, -1,
                               1, {dtype, Device()});
      const Tensor packed = qkv.clone().set_requires_grad();
      const auto seen = std::make_shared<SeenOps>();
      RankContext::current().add_observer(seen);
      const Tensor out = attention(packed, own);
      weighted_sum(out).backward();
      RankContext::current().remove_observer(seen);
      EXPECT_EQ(out.shape(), (Shape{kBatch, kRows, heads * values}));
      // Two products forward, five backward, of kRows (kRows + 1) / 2 pairs
      EXPECT_EQ(seen->flops_of("attention"),
                static_cast<double>(kBatch * heads * kRows * (kRows + 1) *
                                    (4 * dim + 3 * values)));

      const Tensor wide = to_dtype(qkv, DType::kF64).set_requires_grad();
      const auto padded = [&](std::int64_t first, std::int64_t number,
                              std::int64_t width) {
        const Tensor part =
            reshape(slice(wide, 2, first, first + number * width),
                    {kBatch, kRows, number, width});
        if (width == most) {
          return reshape(part, {kBatch, kRows, number * most});
        }
        const Tensor zeros =
            Tensor::zeros({kBatch, kRows, number, most - width}, kOfF64);
        return reshape(concat({part, zeros}, 3),
                       {kBatch, kRows, number * most});
      };
      const Tensor expected = reshape(
          slice(reshape(attention(padded(0, heads, dim),
                                  padded(heads * dim, kv_heads, dim),
                                  padded(keys, kv_heads, values), options),
                        {kBatch, kRows, heads, most}),
                3, 0, values),
          out.shape());
      weighted_sum(expected).backward();
      expect_close(Tensors{out.detach(), packed.grad()},
                   {expected.detach(), wide.grad()}, tolerance);
    }
  }
  AttentionOptions options = attention_of(2);
  options.value_dim = 4;
  const Tensor q = noise({1, 3, 16});
  expect_error([&] { attention(q, q, q, options); },
               {"values of 4 columns", "in one tensor"});
  expect_error([&] { attention(noise({1, 3, 43}), options); }, {"rows of 43"});
}

TEST(Attention, PackedGroupsEqualSeparateOnesBitForBit) {
  AttentionOptions options = attention_of(6, true, 0.2);
  options.kv_heads = 3;
  const Tensor q = leaf({2, 9, 48}, 1), k = leaf({2, 9, 24}, 2),
               v = leaf({2, 9, 24}, 3);
  const Tensor packed = concat({q, k, v}, 2).detach().set_requires_grad();
  Tensor apart, together;
  with_same_draws([&] { apart = attention(q, k, v, options); });
  with_same_draws([&] { together = attention(packed, options); });
  weighted_sum(apart).backward();
  weighted_sum(together).backward();
  expect_same_bits({together.detach(), packed.grad()},
                   {apart.detach(), concat(gradients_of({q, k, v}), 2)});
}

TEST(Attention, CausalRowsDoNotSeeTheFuture) {
  const Setting s{1, 6, 6, 2, 4, true, 0, 0};
  const Tensor a = noise({1, 6, 24});
  const Tensor b = a.clone();
  b.flat_view(5 * 24, {24}).fill(7);  // the last token only
  const Tensor ya = attention(a, options_of(s)),
               yb = attention(b, options_of(s));
  EXPECT_TRUE(bitwise_equal(slice(ya, 1, 0, 5), slice(yb, 1, 0, 5)));
  EXPECT_GT(max_abs_difference(slice(ya, 1, 5, 6), slice(yb, 1, 5, 6)), 1e-3);
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const Tensor qkv = noise({1, 8, 24}, 1, -100, 100, kOfF32);
  for (double v : values(attention(qkv, attention_of(2)))) {
    EXPECT_TRUE(std::isfinite(v));
  }
}

TEST(Attention, KeepsNoSquareMatrix) {
  const OwnDevice own;
  const std::int64_t s = 128, h = 8;
  const Tensor qkv = leaf({1, s, 3 * h});
  AttentionOptions options;
  const Tensor out = attention(qkv, options);
  // qkv, the output and one logarithm per row, in f64.
  EXPECT_EQ(own.device.memory().current_total, 8 * (3 * s * h + s * h + s));
}

TEST(Attention, RepeatsNoSharedKeysInMemory) {
  const OwnDevice own;
  const std::int64_t s = 16, d = 4, heads = 8;
  const Tensor qkv = leaf({1, s, (heads + 2) * d});
  AttentionOptions options = attention_of(heads);
  options.kv_heads = 1;
  const Tensor out = attention(qkv, options);
  EXPECT_EQ(own.device.memory().current_total,
            8 * ((heads + 2) * s * d + heads * s * d + heads * s));
}

TEST(Attention, SaysWhatDoesNotFit) {
  const AttentionOptions four = attention_of(4);
  const Tensor x = noise({2, 3, 8}), one = noise({1, 3, 8});
  const Tensor odd = noise({2, 3, 18}), wide = noise({2, 3, 16});
  const Tensor longer = noise({2, 5, 8}), long_v = noise({2, 4, 8});
  const Tensor narrow = to_dtype(x, DType::kF32);
  expect_error([&] { attention(odd, four); }, {"4 heads", "width of 6"});
  expect_error([&] { attention(wide, four); }, {"[2, 3, 16]", "3 * width"});
  AttentionOptions groups = attention_of(4);
  groups.kv_heads = 2;
  expect_error([&] { attention(odd, groups); },
               {"4 heads of queries", "2 of keys", "18 columns"});
  groups.kv_heads = 3;
  expect_error(
      [&] {
        attention(noise({1, 2, 20}), groups);
      },
      {"3 of keys", "divide"});
  expect_error([&] { attention(x, longer, long_v, four); },
               {"[2, 5, 8]", "[2, 4, 8]"});
  expect_error([&] { attention(x, one, one, four); }, {"one batch"});
  expect_error([&] { attention(x, x, narrow, four); },
               {"attention", "f64", "f32"});
}

}  // namespace
}  // namespace shardbook
