// Convolution, pooling, and batch norm after them: values, layouts, pieces.

#include <vector>

#include "core/layers.h"
#include "core/weight_gradients.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

// f32 sums of a few hundred products, in another order.
constexpr double kF32Tolerance = 2e-5;

struct Sizes {
  Shape x, weight;
  std::int64_t stride, padding;
};

std::vector<Sizes> sizes() {
  return {{{2, 8, 8, 16}, {32, 16, 1, 1}, 1, 0},
          {{3, 9, 7, 20}, {8, 20, 1, 1}, 2, 0},
          {{2, 8, 9, 16}, {16, 16, 3, 3}, 1, 1},
          {{2, 7, 10, 5}, {9, 5, 3, 3}, 2, 1},
          {{2, 17, 16, 3}, {64, 3, 7, 7}, 2, 3},
          {{1, 1, 1, 4}, {6, 4, 3, 3}, 2, 1},
          {{1, 6, 5, 2}, {3, 2, 2, 3}, 3, 2}};
}

/// The definition, term by term.
std::vector<double> convolved(const Tensor& x, const Tensor& weight,
                              const Sizes& s) {
  const auto v = values(x), w = values(weight);
  const std::int64_t h = s.x[1], wide = s.x[2], in = s.x[3];
  const std::int64_t out = s.weight[0], kh = s.weight[2], kw = s.weight[3];
  const std::int64_t oh = (h + 2 * s.padding - kh) / s.stride + 1;
  const std::int64_t ow = (wide + 2 * s.padding - kw) / s.stride + 1;
  std::vector<double> y;
  for (std::int64_t at = 0; at < s.x[0] * oh * ow * out; ++at) {
    const std::int64_t o = at % out, ox = at / out % ow;
    const std::int64_t oy = at / out / ow % oh, n = at / out / ow / oh;
    double sum = 0;
    for (std::int64_t tap = 0; tap < kh * kw * in; ++tap) {
      const std::int64_t c = tap % in, j = tap / in % kw, i = tap / in / kw;
      const std::int64_t py = oy * s.stride + i - s.padding;
      const std::int64_t px = ox * s.stride + j - s.padding;
      if (py < 0 || py >= h || px < 0 || px >= wide) continue;
      sum += v[static_cast<std::size_t>(((n * h + py) * wide + px) * in + c)] *
             w[static_cast<std::size_t>(((o * in + c) * kh + i) * kw + j)];
    }
    y.push_back(sum);
  }
  return y;
}

/// Output and gradients of a weighted sum, as f64.
std::vector<std::vector<double>> run(const Sizes& s, DType dtype,
                                     bool deterministic) {
  const Deterministic order(deterministic);
  const TensorOptions options{dtype, Device()};
  const Tensor x = to_dtype(noise(s.x, 1), dtype).set_requires_grad();
  const Tensor w = to_dtype(noise(s.weight, 2), dtype).set_requires_grad();
  const Tensor b = to_dtype(noise({s.weight[0]}, 3), dtype).set_requires_grad();
  const Tensor y = conv2d(x, w, b, s.stride, s.padding);
  sum(mul(y, noise(y.shape(), 9, 0.5, 1.5, options))).backward();
  return {values(y), values(x.grad()), values(w.grad()), values(b.grad())};
}

TEST(Conv2d, IsTheSumOverTheWindow) {
  for (const Sizes& s : sizes()) {
    const Tensor x = noise(s.x, 1), w = noise(s.weight, 2);
    const Tensor y = conv2d(x, w, Tensor(), s.stride, s.padding);
    expect_close(values(y), convolved(x, w, s), 1e-12);
  }
}

TEST(Conv2d, EveryPathComesNearF64) {
  for (const Sizes& s : sizes()) {
    SCOPED_TRACE(shape_text(s.x) + " by " + shape_text(s.weight));
    const auto exact = run(s, DType::kF64, false);
    for (const bool deterministic : {false, true}) {
      const auto f32 = run(s, DType::kF32, deterministic);
      const auto bf16 = run(s, DType::kBF16, deterministic);
      const auto f16 = run(s, DType::kF16, deterministic);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        double largest = 0;
        for (const double v : exact[i])
          largest = std::max(largest, std::fabs(v));
        for (std::size_t j = 0; j < exact[i].size(); ++j) {
          ASSERT_NEAR(f32[i][j], exact[i][j], kF32Tolerance * largest);
          ASSERT_NEAR(bf16[i][j], exact[i][j], 3e-2 * largest);
          ASSERT_NEAR(f16[i][j], exact[i][j], 5e-3 * largest);
        }
      }
    }
  }
}

// Pipelines rely on this: an image's bits do not depend on the others.
TEST(Conv2d, AnImageAloneIsTheSameInDeterministicMode) {
  Deterministic deterministic;
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const Sizes& s : sizes()) {
      const Tensor x = to_dtype(noise(s.x, 1), dtype).set_requires_grad();
      const Tensor w = to_dtype(noise(s.weight, 2), dtype).set_requires_grad();
      const Tensor y = conv2d(x, w, Tensor(), s.stride, s.padding);
      sum(y).backward();
      for (std::int64_t i = 0; i < s.x[0]; ++i) {
        const Tensor one = x.rows_view(i, i + 1).detach().set_requires_grad();
        const Tensor alone =
            conv2d(one, w.detach(), Tensor(), s.stride, s.padding);
        EXPECT_TRUE(bitwise_equal(alone.detach(), y.rows_view(i, i + 1)));
        sum(alone).backward();
        EXPECT_TRUE(bitwise_equal(one.grad(), x.grad().rows_view(i, i + 1)));
      }
    }
  }
}

TEST(Conv2d, WeightGradientsCanWait) {
  const Tensor x = leaf({2, 5, 5, 3});
  auto weight = [] {
    MemoryScope kind(MemoryKind::kParameter);
    return leaf({4, 3, 3, 3}, 2);
  };
  const Tensor now = weight(), later = weight();
  sum(conv2d(x, now, Tensor(), 1, 1)).backward();
  WeightGradients store;
  {
    DeferWeightGradients scope(store);
    sum(conv2d(x, later, Tensor(), 1, 1)).backward();
  }
  store.flush();
  EXPECT_FALSE(later.grad().defined());
  store.pop();
  EXPECT_TRUE(bitwise_equal(now.grad(), later.grad()));
}

TEST(Conv2d, IsAProductToTheCostModel) {
  const auto events = std::make_shared<SeenOps>();
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  const Tensor x = leaf({2, 9, 9, 3}), w = leaf({8, 3, 3, 3}, 2);
  const Tensor wide = leaf({2, 9, 9, 64}), windows = leaf({64, 64, 3, 3}, 2);
  context.add_observer(events);
  conv2d(x, w, Tensor(), 2, 1);
  // Kernels with fewer operations are calibrated separately
  conv2d(wide, windows, Tensor(), 1, 1);
  context.remove_observer(events);
  ASSERT_EQ(events->begun.size(), 2u);
  const OpEvent& event = events->begun[0];
  EXPECT_STREQ(event.name, "conv2d");
  EXPECT_STREQ(events->begun[1].name, "conv2d_3x3");
  EXPECT_EQ(event.product.m, 2 * 5 * 5);
  EXPECT_EQ(event.product.n, 8);
  EXPECT_EQ(event.product.k, 27);
  EXPECT_EQ(event.flops, 2.0 * 50 * 8 * 27);
  EXPECT_EQ(event.bytes, 8.0 * (2 * 81 * 3 + 8 * 27 + 50 * 8));
}

TEST(Conv2d, RefusesWhatDoesNotFit) {
  const Tensor x = noise({1, 4, 4, 3}), w = noise({2, 3, 3, 3});
  expect_error([&] { conv2d(noise({4, 4, 3}), w); }, {"[4, 4, 3]"});
  expect_error([&] { conv2d(x, noise({2, 4, 3, 3})); }, {"[2, 4, 3, 3]"});
  expect_error([&] { conv2d(x, w, noise({3})); }, {"bias [3]"});
  expect_error([&] { conv2d(x, w, Tensor(), 0); }, {"stride 0"});
  expect_error([&] { conv2d(x, noise({2, 3, 5, 5})); }, {"5 x 5", "4 x 4"});
  expect_error([&] { conv2d(x, to_dtype(w, DType::kF32)); }, {"f64", "f32"});
}

TEST(MaxPool2d, TakesTheLargestAndGivesItsGradientToTheFirst) {
  // 3 x 3, window 2, stride 1: 5 wins everywhere, and of equals the first.
  const Tensor x = leaf_of({1, 2, 0, 2, 5, 5, 1, 0, 5}, {1, 3, 3, 1});
  const Tensor y = max_pool2d(x, 2, 1);
  EXPECT_EQ(values(y), (std::vector<double>{5, 5, 5, 5}));
  sum(y).backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{0, 0, 0, 0, 4, 0, 0, 0, 0}));
}

TEST(MaxPool2d, PaddingNeverWins) {
  const Tensor x = noise({1, 4, 4, 2}, 1, -3, -1);
  const Tensor y = max_pool2d(x, 3, 2, 1);
  EXPECT_EQ(y.shape(), (Shape{1, 2, 2, 2}));
  for (const double v : values(y)) EXPECT_LT(v, 0);
  expect_error([&] { max_pool2d(x, 3, 2, 2); }, {"padding 2", "3"});
}

TEST(GlobalAvgPool2d, IsTheMeanOverPixels) {
  const Tensor x = noise({2, 3, 4, 5});
  expect_close(global_avg_pool2d(x), mean(reshape(x, {2, 12, 5}), 1), 1e-14);
}

// --- Batch norm of images ----------------------------------------------------

TEST(ImageNorm, AddsAndCutsInTheSamePass) {
  for (const bool training : {true, false}) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      InitOptions init;
      init.dtype = dtype;
      BatchNorm plain(19, init), fused(19, init);
      fused.relu = true;
      plain.train(training);
      fused.train(training);
      const TensorOptions options{dtype, Device()};
      const Tensor x = leaf({300, 2, 2, 19}, 1, -1, 1, options);
      const Tensor z = leaf({300, 2, 2, 19}, 2, -1, 1, options);
      const Tensor x2 = leaf({300, 2, 2, 19}, 1, -1, 1, options);
      const Tensor z2 = leaf({300, 2, 2, 19}, 2, -1, 1, options);
      const Tensor y = fused(Tensors{x, z})[0];
      const Tensor expected = relu(add(plain(x2), z2));
      const double tolerance = dtype == DType::kF64 ? 1e-12 : 1e-5;
      expect_close(y.detach(), expected.detach(), tolerance);
      weighted_sum(y).backward();
      weighted_sum(expected).backward();
      expect_close(x.grad(), x2.grad(), tolerance);
      expect_close(z.grad(), z2.grad(), tolerance);
      expect_close(fused.weight.grad(), plain.weight.grad(), 10 * tolerance);
      expect_close(fused.bias.grad(), plain.bias.grad(), 10 * tolerance);
    }
  }
}

TEST(ImageNorm, KeepsItsDigitsFarFromZero) {
  // Variance 1/3 around 1000: a plain sum of squares in f32 would lose it.
  const Tensor x = noise({3000, 5}, 1, 999, 1001, kOfF32);
  const Tensor c = Tensor::full({5}, 1, kOfF32);
  const BatchNormResult ours = batch_norm_train(x, c, c, {.eps = 0});
  const Tensor wide = to_dtype(x, DType::kF64), exact = mean(wide, 0);
  expect_close(ours.mean, exact, 1e-9);
  expect_close(ours.variance, mean(square(sub(wide, exact)), 0), 1e-5);
}

TEST(DeferredBatchNorm, UpdatesOnceWithTheWholeBatch) {
  const Tensor x = noise({10, 4, 3}, 1, 2, 7);
  BatchNorm whole(3, f64_init()), pieces(3, f64_init());
  whole(x);
  defer_batch_norms(pieces);
  // Four were asked for; ceil(10 / 4) at a time gives 3, 3, 3, 1.
  for (const auto& [from, to] : {std::pair(0, 3), {3, 6}, {6, 9}, {9, 10}}) {
    pieces(x.rows_view(from, to));
    EXPECT_EQ(values(pieces.running_mean), std::vector<double>(3, 0));
  }
  commit_batch_norms(pieces);
  expect_close(pieces.running_mean, whole.running_mean, 1e-14);
  expect_close(pieces.running_var, whole.running_var, 1e-13);
  const Tensor after = pieces.running_mean.clone();
  pieces.commit();  // nothing new
  EXPECT_TRUE(bitwise_equal(pieces.running_mean, after));
}

// Two ranks with half of the batch each, one of which has two pieces.
TEST(DeferredBatchNorm, RanksAddTheirSumsAndCommitWithTheirNumber) {
  const Tensor x = noise({12, 4, 3}, 1, 2, 7);
  BatchNorm whole(3, f64_init());
  BatchNorm one(3, f64_init()), other(3, f64_init());
  whole(x);
  defer_batch_norms(one);
  defer_batch_norms(other);
  EXPECT_TRUE(one.pending().empty());
  one(x.rows_view(0, 2));
  one(x.rows_view(2, 6));
  other(x.rows_view(6, 12));
  const Tensors mine = one.pending(), theirs = pending_statistics(other);
  ASSERT_EQ(theirs.size(), mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    NoGrad no_grad;
    mine[i].copy_from(add(mine[i], theirs[i]));
  }
  commit_batch_norms(one, /*num_ranks=*/2);
  expect_close(one.running_mean, whole.running_mean, 1e-14);
  expect_close(one.running_var, whole.running_var, 1e-13);
  EXPECT_TRUE(one.pending().empty());
}

// torchgpipe stores the biased variance: n - 1 values against n.
TEST(DeferredBatchNorm, StoresTheUnbiasedVariance) {
  BatchNorm norm(1, f64_init(), 1e-5, /*momentum=*/1);
  norm.deferred = true;
  norm(Tensor::from_values<double>({1, 3}, {2, 1}));
  norm(Tensor::from_values<double>({5, 7}, {2, 1}));
  norm.commit();
  EXPECT_NEAR(norm.running_var.item(), 20.0 / 3, 1e-14);
}

}  // namespace
}  // namespace shardbook
