// Training: the loop, and the comparison with one device.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "chapters/common/run/report.h"
#include "chapters/common/run/training.h"
#include "core/context.h"
#include "tests/chapters/common/common_support.h"

namespace shardbook::common_test {
namespace {

// --- The loop ---------------------------------------------------------------

Options tiny_run() {
  Options options;
  options.model = "gpt-nano";
  options.data = "random";
  options.dtype = DType::kF64;
  options.batch = 6;
  options.seq = 5;
  options.steps = 3;
  return options;
}

TEST(Training, DependsOnTheSeedAlone) {
  const Options options = tiny_run();
  const ReferenceRun a = train_one_device(options);
  RankContext::current().random = {9, 9, 9, {9, 9}};
  const ReferenceRun b = train_one_device(options);
  EXPECT_EQ(a.losses, b.losses);
  Options other = options;
  other.seed = 5;
  EXPECT_NE(train_one_device(other).losses, a.losses);
}

TEST(Training, LearnsWhatItRepeats) {
  Options options = tiny_run();
  options.steps = 12;
  options.dtype = DType::kF32;
  options.optimizer_options.lr = 1e-2;
  options.data = "book";
  options.batch = 24;
  const ReferenceRun run = train_one_device(options);
  EXPECT_LT(run.losses.back(), run.losses.front() - 0.5);
}

TEST(Training, RefusesMoreMicroBatchesThanSamples) {
  expect_error([] { train_one_device(tiny_run(), 7); },
               {"--micro-batches 7", "1 to 6"});
  Options options = tiny_run();
  options.seq = 257;
  expect_error([&] { build_model(options); }, {"--seq 257", "256 positions"});
}

// The loss stays finite if the update is skipped: only the step itself shows
// the error. In f16 that is an overflow, and the loss scale falls.
TEST(Training, NamesTheStepThatWasLeftOut) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Options options = tiny_run();
    options.dtype = dtype;
    options.warmup = 3;
    const auto optimizer =
        make_optimizer("sgd", {Tensor::zeros({1})}, options.optimizer_options);
    std::vector<double> rates;
    const TrainingLog log =
        train(options, *optimizer, /*is_main=*/false, [&](std::int64_t k) {
          rates.push_back(optimizer->options().lr);
          StepResult result;
          result.was_skipped = k == 1;
          result.grad_norm = k == 1 ? INFINITY : 1;
          return result;
        });
    SCOPED_TRACE(dtype_name(dtype));
    EXPECT_EQ(log.not_finite.step, dtype == DType::kF16 ? -1 : 1);
    EXPECT_EQ(log.not_finite.is_gradient, dtype != DType::kF16);
    EXPECT_GT(rates[1], rates[0]);
    EXPECT_EQ(rates[2], rates[1]);
  }
}

/// The first bad value that `train` reports for these losses and norms.
TrainingLog::NotFinite first_bad(const std::vector<double>& losses,
                                 const std::vector<double>& norms) {
  Options options = tiny_run();
  options.steps = static_cast<std::int64_t>(losses.size());
  const auto none = make_optimizer("sgd", {}, {});
  return train(options, *none, /*is_main=*/true,
               [&](std::int64_t k) {
                 StepResult result;
                 result.loss = losses[static_cast<std::size_t>(k)];
                 result.grad_norm = norms[static_cast<std::size_t>(k)];
                 return result;
               })
      .not_finite;
}

TEST(Training, NamesTheStepWhoseGradientSpoiledTheLoss) {
  const double nan = std::nan("");
  const auto gradient = first_bad({3, 2, 2, nan}, {1, 1, INFINITY, nan});
  EXPECT_EQ(gradient.step, 2);
  EXPECT_TRUE(gradient.is_gradient);
  const auto loss = first_bad({3, nan, nan}, {1, nan, nan});
  EXPECT_EQ(loss.step, 1);
  EXPECT_FALSE(loss.is_gradient);
  EXPECT_EQ(first_bad({3, 2, 1}, {1, INFINITY, 1}).step, -1);
  // Stages that update independently have no norm
  const auto later = first_bad({3, 2, 1, nan}, {nan, nan, nan, nan});
  EXPECT_EQ(later.step, 3);
  EXPECT_FALSE(later.is_gradient);
}

// --- The claim about numbers ------------------------------------------------

/// A run's loss and parameter, compared with 2 and {1, 2} on one device.
bool passes(double loss, const std::vector<double>& values,
            DType dtype = DType::kF64) {
  Options options;
  options.dtype = dtype;
  options.steps = 1;
  const auto parameter = [&](const std::vector<double>& of) {
    const Tensor tensor = Tensor::empty({2}, {dtype, Device()});
    tensor.copy_from(Tensor::from_values<double>(of, {2}));
    return std::vector<NamedTensor>{{"w", tensor}};
  };
  ReferenceRun one;
  one.losses = {2};
  one.parameters = parameter({1, 2});
  return compare_runs(options, {{loss}, {}, parameter(values)}, one).passed;
}

TEST(ParityClaim, FailsForWhatDiffersAndForWhatIsNoNumber) {
  const double nan = std::nan("");
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    EXPECT_TRUE(passes(2, {1, 2}, dtype));
    EXPECT_FALSE(passes(2.5, {1, 2}, dtype)) << dtype_name(dtype);
    EXPECT_FALSE(passes(2, {1.5, 2}, dtype)) << dtype_name(dtype);
    EXPECT_FALSE(passes(nan, {1, 2}, dtype)) << dtype_name(dtype);
    EXPECT_FALSE(passes(2, {1, nan}, dtype)) << dtype_name(dtype);
  }
}

}  // namespace
}  // namespace shardbook::common_test
