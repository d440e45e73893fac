// Layer, RMS and batch normalisation: values, running statistics, pieces of a batch.

#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/layers.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

TEST(LayerNorm, RowsHaveMeanZeroAndVarianceOne) {
  const Tensor x = noise({4, 50}, 1, 3, 9);
  LayerNorm norm(50, f64_init(), /*eps=*/0);
  const Tensor y = norm(x);
  expect_close(values(mean(y, 1)), std::vector<double>(4, 0), 1e-13);
  expect_close(values(mean(square(y), 1)), std::vector<double>(4, 1), 1e-12);
  norm.weight.fill(2);
  norm.bias.fill(-1);
  expect_close(norm(x), add_scalar(scale(y, 2), -1), 1e-13);
}

TEST(LayerNorm, EpsilonIsInsideTheRoot) {
  // Variance 1: y = (x - 2) / sqrt(1 + 3).
  const Tensor x = Tensor::from_values<double>({1, 3}, {1, 2});
  LayerNorm norm(2, f64_init(), /*eps=*/3);
  EXPECT_EQ(values(norm(x)), (std::vector<double>{-0.5, 0.5}));
}

TEST(LayerNorm, RefusesOtherShapesAndDtypes) {
  const Tensor x = noise({2, 6}), g = noise({6});
  expect_error([&] { layer_norm(x, noise({5}), g); }, {"[5]", "[2, 6]"});
  expect_error([&] { layer_norm(x, g, noise({1, 6})); }, {"[1, 6]"});
  const Tensor narrow = to_dtype(g, DType::kF32);
  expect_error([&] { layer_norm(x, narrow, g); }, {"f64", "f32"});
  expect_error([&] { layer_norm(x, g, narrow); }, {"f64", "f32"});
}

/// x rounded to a dtype, in f64.
double rounded(double x, DType dtype) {
  return to_dtype(Tensor::full({}, x, kOfF64), dtype).item();
}

/// weight * round(x / sqrt(mean of x^2 + eps)), row by row.
std::vector<double> rms_normalised(const Tensor& x, const Tensor& weight,
                                   double eps) {
  const std::vector<double> in = values(x), w = values(weight);
  std::vector<double> out(in.size());
  for (std::size_t row = 0; row < in.size(); row += w.size()) {
    double squares = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      squares += in[row + i] * in[row + i];
    }
    const double rstd =
        1 / std::sqrt(squares / static_cast<double>(w.size()) + eps);
    for (std::size_t i = 0; i < w.size(); ++i) {
      out[row + i] = w[i] * rounded(in[row + i] * rstd, x.dtype());
    }
  }
  return out;
}

TEST(RmsNorm, EqualsItsDefinition) {
  // As narrow as heads, and as wide as models
  for (const std::int64_t n : {1, 5, 16, 64, 80, 128, 129, 1030}) {
    const Tensor x = noise({3, 7, n}, 1, -2, 3), weight = noise({n}, 2);
    expect_close(values(rms_norm(x, weight, 0.1)),
                 rms_normalised(x, weight, 0.1), 1e-13);
  }
}

TEST(RmsNorm, IsAModuleThatStartsFromOnes) {
  // Mean of squares 5: y = x / sqrt(5 + 4).
  const Tensor x = Tensor::from_values<double>({1, 3}, {1, 2});
  RmsNorm norm(2, f64_init(), /*eps=*/4);
  expect_close(values(norm(x)), {1.0 / 3, 1}, 1e-15);
  norm.weight.copy_from(Tensor::from_values<double>({3, -1}, {2}));
  expect_close(values(norm(x)), {1, -1}, 1e-15);
  EXPECT_EQ(norm.named_parameters().size(), 1u);
}

TEST(RmsNorm, RoundsTheQuotientBeforeTheWeightMultiplies) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const TensorOptions narrow{dtype, Device()};
    const Tensor x = noise({4, 96}, 1, -2, 2, narrow);
    const Tensor weight = noise({96}, 2, 0.5, 2, narrow);
    const std::vector<double> twice = rms_normalised(x, weight, 1e-5);
    const std::vector<double> once =
        rms_normalised(to_dtype(x, DType::kF64), weight, 1e-5);
    const std::vector<double> y = values(rms_norm(x, weight, 1e-5));
    int from_twice = 0, from_once = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      from_twice += y[i] != rounded(twice[i], dtype);
      from_once += y[i] != rounded(once[i], dtype);
    }
    // Where f64 is all but between two numbers, f32 may choose the other one
    EXPECT_LE(from_twice, 2) << "of " << y.size();
    EXPECT_GT(from_once, 20) << "of " << y.size();
  }
}

// The gradient of weight sums the values that weight multiplied.
TEST(RmsNorm, TheWeightsGradientSumsRoundedQuotients) {
  constexpr std::int64_t kRows = 8, kCols = 96;
  const TensorOptions bf16{DType::kBF16, Device()};
  const Tensor x = noise({kRows, kCols}, 1, -2, 2, bf16);
  const Tensor weight = leaf({kCols}, 2, 0.5, 2, bf16);
  sum(rms_norm(x, weight, 1e-5)).backward();
  const std::vector<double> found = values(weight.grad());
  const auto differs_from = [&](const Tensor& input) {
    const Tensor ones = Tensor::full({kCols}, 1, kOfF64);
    const Tensor quotients = Tensor::from_values<double>(
        rms_normalised(input, ones, 1e-5), {kRows, kCols});
    const std::vector<double> sums = values(sum(quotients, 0));
    int different = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      different += found[i] != rounded(sums[i], DType::kBF16);
    }
    return different;
  };
  EXPECT_LE(differs_from(x), 2);
  EXPECT_GT(differs_from(to_dtype(x, DType::kF64)), 10);
}

TEST(RmsNorm, KeepsItsInputAndOneNumberPerRow) {
  for (const auto& [dtype, stat] :
       {std::pair{DType::kF64, 8}, {DType::kF32, 4}, {DType::kBF16, 4}}) {
    const OwnDevice own;
    const Tensor x = leaf({6, 10}, 1, -1, 1, {dtype, own.device});
    const Tensor weight = leaf({10}, 2, -1, 1, {dtype, own.device});
    const std::int64_t before = own.device.memory().current_total;
    const Tensor y = rms_norm(x, weight, 1e-5);
    EXPECT_EQ(own.device.memory().current_total - before, y.bytes() + 6 * stat);
  }
}

TEST(RmsNorm, RefusesOtherShapesAndDtypes) {
  const Tensor x = noise({2, 6}), g = noise({6});
  expect_error([&] { rms_norm(x, noise({5}), 1e-5); }, {"[5]", "[2, 6]"});
  expect_error([&] { rms_norm(x, noise({1, 6}), 1e-5); }, {"[1, 6]"});
  expect_error([&] { rms_norm(x, to_dtype(g, DType::kF32), 1e-5); },
               {"rms_norm", "f64", "f32"});
}

TEST(BatchNorm, NormalisesByTheBatchAndRemembersUnbiased) {
  // Channel 0: 1, 3 -> mean 2, variance 1, unbiased 2. Channel 1: constant 5.
  const Tensor x = Tensor::from_values<double>({1, 5, 3, 5}, {2, 2});
  BatchNorm norm(2, f64_init(), /*eps=*/0.25, /*momentum=*/0.1);
  const Tensor y = norm(x);
  const double r = 1 / std::sqrt(1.25);
  expect_close(values(y), {-r, 0, r, 0}, 1e-15);
  expect_close(values(norm.running_mean), {0.2, 0.5}, 1e-15);
  expect_close(values(norm.running_var), {0.9 + 0.1 * 2, 0.9}, 1e-15);
  norm(x);
  expect_close(values(norm.running_mean), {0.38, 0.95}, 1e-15);
}

TEST(BatchNorm, EvaluationUsesAndKeepsTheRunningStatistics) {
  BatchNorm norm(2, f64_init(), /*eps=*/0);
  norm.running_mean.copy_from(Tensor::from_values<double>({1, 2}, {2}));
  norm.running_var.copy_from(Tensor::from_values<double>({4, 16}, {2}));
  norm.train(false);
  const Tensor x = Tensor::from_values<double>({3, 5, 6, 10}, {1, 2, 2});
  const Tensor y = norm(x);
  EXPECT_EQ(values(y), (std::vector<double>{1, 0.75, 2.5, 2}));
  EXPECT_EQ(values(norm.running_mean), (std::vector<double>{1, 2}));
  EXPECT_EQ(values(norm.running_var), (std::vector<double>{4, 16}));
}

TEST(BatchNorm, SharesBuffersWithItsClones) {
  BatchNorm norm(2, f64_init());
  const std::unique_ptr<Module> copy = norm.clone();
  (*copy)(noise({4, 2}));
  EXPECT_NE(values(norm.running_mean)[0], 0);
}

TEST(BatchNorm, RefusesOtherShapesAndDtypes) {
  const Tensor x = noise({4, 3}), c = noise({3}, 2, 0.5, 1);
  expect_error([&] { batch_norm_train(noise({4}), c, c, {}); }, {"[4]"});
  expect_error([&] { batch_norm_train(x, noise({4}), c, {}); }, {"[4]", "3"});
  expect_error([&] { batch_norm_train(x, c, to_dtype(c, DType::kF32), {}); },
               {"f64", "f32"});
  expect_error([&] { batch_norm_eval(x, noise({2}), c, c, c, 0); },
               {"[2]", "3"});
}

/// Two threads that exchange sums like ranks.
class TwoRanks {
 public:
  /// The function for rank `rank`; both threads get the sum in rank order.
  SumOverRanks sum(int rank) {
    return [this, rank](const Tensor& sums) {
      calls_ += rank == 0;
      parts_[rank] = sums.clone();
      barrier();
      const Tensor total = add(parts_[0], parts_[1]);
      barrier();
      sums.copy_from(total);
    };
  }
  int calls() const { return calls_; }

 private:
  void barrier() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++waiting_ == 2) {
      waiting_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0, round_ = 0, calls_ = 0;
  Tensor parts_[2];
};

// The pieces of a batch, of different sizes, normalise as the whole does.
TEST(BatchNorm, SynchronisedEqualsTheWholeBatch) {
  const Device device = Device::cpu();
  RankContext main_context(device);
  RankContext::Scope main_scope(main_context);
  const Tensor x = leaf({7, 2, 3}, 1, 2, 5);
  const Tensor weights = noise({7, 2, 3}, 9, 0.5, 1.5);
  BatchNorm whole(3, f64_init());
  const Tensor y = whole(x);
  sum(mul(y, weights)).backward();

  TwoRanks ranks;
  const std::int64_t cuts[] = {0, 3, 7};
  Tensor ys[2], dxs[2], dgammas[2], running[2];
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      RankContext context(device, r);
      RankContext::Scope scope(context);
      BatchNorm norm(3, f64_init());
      norm.sum_over_ranks = ranks.sum(r);
      const Tensor mine =
          x.rows_view(cuts[r], cuts[r + 1]).clone().set_requires_grad();
      const Tensor part = norm(mine);
      autograd::backward({part}, {weights.rows_view(cuts[r], cuts[r + 1])});
      ys[r] = part.detach();
      dxs[r] = mine.grad();
      dgammas[r] = norm.weight.grad();
      running[r] = norm.running_var;
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_close(concat({ys[0], ys[1]}, 0), y.detach(), 1e-13);
  expect_close(concat({dxs[0], dxs[1]}, 0), x.grad(), 1e-12);
  // Parameters get gradients from their own rows; the sum is the whole.
  expect_close(add(dgammas[0], dgammas[1]), whole.weight.grad(), 1e-12);
  expect_close(running[0], whole.running_var, 1e-13);
  expect_close(running[1], whole.running_var, 1e-13);
  EXPECT_EQ(ranks.calls(), 3);  // two forward, one backward
}

}  // namespace
}  // namespace shardbook
