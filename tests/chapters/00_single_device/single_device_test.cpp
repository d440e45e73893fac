// One device: pieces, recomputation and precision change nothing (or only
// rounding), and the bill is exact.

#include "chapters/00_single_device/single_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "chapters/common/models/checkpoint.h"
#include "core/ops.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook::single_device {
namespace {

Options small_options() {
  Options options;
  options.data = "random";
  options.steps = 3;
  options.batch = 8;
  options.seq = 16;
  return options;
}

struct TrainedRun {
  std::vector<double> losses;
  std::vector<NamedTensor> parameters;
  MemoryStats memory;
  MemoryBill bill;
};

TrainedRun train_with(const Options& options,
                      const SingleDeviceOptions& setup = {}) {
  RankContext context(Device::cpu(0));
  RankContext::Scope scope(context);
  SingleDevice device(options, setup);
  TrainedRun run;
  run.losses = train(options, device.optimizer(), false, [&](std::int64_t k) {
                 return device.step(k);
               }).losses;
  run.parameters = device.model().model->named_parameters();
  run.memory = context.device.memory();
  run.bill = device.bill();
  return run;
}

bool same_bits(const TrainedRun& a, const TrainedRun& b) {
  if (a.losses != b.losses) return false;
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    if (!bitwise_equal(a.parameters[i].tensor, b.parameters[i].tensor)) {
      return false;
    }
  }
  return true;
}

double largest_relative_difference(const Options& options, const TrainedRun& a,
                                   const TrainedRun& b) {
  return compare_runs(options, {a.losses, {}, a.parameters},
                      {b.losses, {}, b.parameters})
      .max_rel;
}

class SingleDevicePieces : public testing::TestWithParam<int> {};

TEST_P(SingleDevicePieces, MicroBatchesEqualTheWholeBatch) {
  Options options = small_options();
  options.dtype = DType::kF64;
  const TrainedRun whole = train_with(options);
  const TrainedRun pieces =
      train_with(options, {.num_micro_batches = GetParam()});
  // Also 3 pieces of 8 samples, of 3, 3 and 2: each is weighted by its size.
  EXPECT_LT(largest_relative_difference(options, pieces, whole), 1e-10);
}

// Also with uneven pieces, where the first is larger than the others.
TEST_P(SingleDevicePieces, MemoryHeldEqualsTheBill) {
  for (const bool recompute : {false, true}) {
    for (const char* model : {"gpt-nano", "mlp"}) {
      for (const double dropout : {0.0, 0.1}) {
        if (model == std::string("mlp") && (recompute || dropout > 0)) continue;
        Options options = small_options();
        options.model = model;
        options.dropout = dropout;
        const TrainedRun run = train_with(
            options, {.num_micro_batches = GetParam(), .recompute = recompute});
        for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
          const auto kind = static_cast<MemoryKind>(k);
          EXPECT_EQ(static_cast<double>(run.memory.held(kind)),
                    run.bill.bytes[k])
              << model << " " << held_name(kind) << " dropout " << dropout
              << (recompute ? " recomputed" : "");
        }
      }
    }
  }
}

// The mlp's logits are as wide as its hidden layers: fc1 and fc2 keep 5 h
// numbers per token, fc3 h, the logits and their softmax's sum 4 h + 1.
// Backward begins with the gradients of the loss and of the logits.
TEST(SingleDevice, ThePeakIsAtTheLoss) {
  Options options = small_options();
  options.model = "mlp";
  const double tokens = 8 * 16, h = 64;
  EXPECT_EQ(static_cast<double>(
                train_with(options).memory.peak(MemoryKind::kActivation)),
            4 * (tokens * (11 * h + 2 * 4 * h + 1) + 2));
}

// A ResNet's running statistics have no masters; an f16 step that overflows
// leaves the optimizer without a state.
TEST(SingleDevice, OptimizerStateInSixteenBitsEqualsTheBill) {
  Options options = small_options();
  options.model = R"({"model_type": "resnet", "depths": [1, 1],
      "embedding_size": 4, "num_labels": 5})";
  options.image_size = 16;
  options.seq = 1;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t steps : {1, 8}) {
      options.dtype = dtype;
      options.steps = steps;
      TrainedRun run = train_with(options, {.master_weights = true});
      EXPECT_EQ(
          static_cast<double>(run.memory.held(MemoryKind::kOptimizerState)),
          run.bill[MemoryKind::kOptimizerState])
          << dtype_name(dtype) << " " << steps;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pieces, SingleDevicePieces,
                         testing::ValuesIn(sized<int>({1, 2, 3, 4, 8},
                                                      {1, 3})));

TEST(SingleDevice, AveragingTheMeansOfUnevenPiecesIsWrong) {
  Options options = small_options();
  options.dtype = DType::kF64;
  RankContext context(Device::cpu(0));
  RankContext::Scope scope(context);
  const LoadedModel loaded = build_model(options);
  const Dataset data = Dataset::open("random", 16, 256, 0);
  const double right = accumulate_gradients(options, *loaded.model, data, 0, 3);
  double mean_of_means = 0;
  for (std::int64_t i = 0; i < 3; ++i) {
    NoGrad no_grad;
    const Batch batch = data.batch(0, 8, BatchSlice{i, 3}, (8 - i + 2) / 3);
    mean_of_means +=
        language_loss((*loaded.model)(batch.inputs), batch.targets).item() / 3;
  }
  EXPECT_GT(std::abs(mean_of_means - right), 1e-6);
}

TEST(SingleDevice, RecomputationEqualsThePlainRunBitForBit) {
  for (const double dropout : {0.0, 0.2}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      Options options = small_options();
      options.dropout = dropout;
      options.dtype = dtype;
      EXPECT_TRUE(same_bits(train_with(options),
                            train_with(options, {.recompute = true})))
          << dtype_name(dtype) << " dropout " << dropout;
    }
  }
}

TEST(SingleDevice, DropoutDoesNotDependOnThePieces) {
  Options options = small_options();
  options.dtype = DType::kF64;
  options.dropout = 0.3;
  const TrainedRun whole = train_with(options);
  const TrainedRun pieces = train_with(options, {.num_micro_batches = 4});
  EXPECT_LT(largest_relative_difference(options, pieces, whole), 1e-10);
  Options other = options;
  other.seed = 1;
  EXPECT_FALSE(same_bits(whole, train_with(other)));
}

TEST(SingleDevice, SixteenBitsStayNearF32) {
  Options options = small_options();
  options.steps = kSanitized ? 3 : 10;
  const TrainedRun f32 = train_with(options);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    options.dtype = dtype;
    TrainedRun run = train_with(options, {.master_weights = true});
    for (std::size_t i = 0; i < run.losses.size(); ++i) {
      EXPECT_NEAR(run.losses[i], f32.losses[i], 1e-2 * f32.losses[i]);
    }
  }
}

// The first steps overflow and are skipped, in the run on one device as well.
// The first step that updates takes longer than the later ones.
TEST(SingleDevice, SkippedStepsAreSkippedByThePlainRunToo) {
  Options options = small_options();
  options.model = R"({"model_type": "resnet", "depths": [1, 1, 1],
      "embedding_size": 8, "num_labels": 5})";
  options.image_size = 16;
  options.seq = 1;
  options.dtype = DType::kF16;
  options.optimizer_options.lr = 0.1;
  RankContext context(Device::cpu(0));
  RankContext::Scope scope(context);
  const SingleDeviceOptions setup{.num_micro_batches = 2};
  SingleDevice device(options, setup);
  std::vector<bool> updates, is_regular;
  for (std::int64_t k = 0; k < 8; ++k) {
    updates.push_back(std::isfinite(device.step(k).grad_norm));
    is_regular.push_back(device.has_predictable_time());
  }
  const auto first = std::find(updates.begin(), updates.end(), true);
  ASSERT_NE(first, updates.begin()) << "nothing overflows";
  ASSERT_LT(first + 1, updates.end() - 1) << "all of it overflows";
  const auto at = static_cast<std::size_t>(first - updates.begin());
  EXPECT_FALSE(is_regular[at]);
  EXPECT_EQ(is_regular[at + 1], updates[at + 1]);

  options.steps = 8;
  const TrainedRun run = train_with(options, setup);
  const ReferenceRun plain = train_plain(options, 2);
  EXPECT_TRUE(same_bits(run, {plain.losses, plain.parameters, {}, {}}));
  const ReferenceRun unscaled = train_one_device(options, 2);
  EXPECT_FALSE(same_bits(run, {unscaled.losses, unscaled.parameters, {}, {}}));
}

TEST(SingleDevice, WithoutMastersSmallUpdatesVanish) {
  Options options = small_options();
  options.optimizer = "sgd";
  options.optimizer_options.lr = 3e-3;
  options.steps = kSanitized ? 4 : 40;
  const TrainedRun f32 = train_with(options);
  options.dtype = DType::kBF16;
  auto distance_from_f32 = [&](const TrainedRun& run) {
    double distance = 0;
    for (std::size_t i = 0; i < run.parameters.size(); ++i) {
      const auto a = run.parameters[i].tensor.to_vector<double>();
      const auto b = f32.parameters[i].tensor.to_vector<double>();
      for (std::size_t j = 0; j < a.size(); ++j) {
        distance += std::abs(a[j] - b[j]);
      }
    }
    return distance;
  };
  EXPECT_LT(distance_from_f32(train_with(options, {.master_weights = true})),
            distance_from_f32(train_with(options)));
}

TEST(SingleDevice, AnOverflowInF16ChangesNothing) {
  Options options = small_options();
  options.dtype = DType::kF16;
  RankContext context(Device::cpu(0));
  RankContext::Scope scope(context);
  SingleDevice device(options, {});
  const Tensor weight = device.optimizer().parameters()[0];
  // Products of these weights exceed f16's largest number.
  fill_normal(weight, 0, 0, 0, 20000);
  const Tensor before = weight.clone();
  const StepResult result = device.step(0);
  EXPECT_FALSE(std::isfinite(result.grad_norm));
  EXPECT_FALSE(device.has_predictable_time());
  EXPECT_EQ(device.bill()[MemoryKind::kOptimizerState], 0);
  EXPECT_TRUE(bitwise_equal(weight, before));
  EXPECT_FALSE(weight.grad().defined());
}

// The rate follows the number of updates, not of steps.
TEST(SingleDevice, ASkippedStepDoesNotMoveTheSchedule) {
  Options options = small_options();
  options.dtype = DType::kF16;
  options.steps = 4;
  options.warmup = 4;
  RankContext context(Device::cpu(0));
  RankContext::Scope scope(context);
  SingleDevice device(options, {});
  std::vector<double> rates;
  train(options, device.optimizer(), false, [&](std::int64_t k) {
    rates.push_back(device.optimizer().options().lr);
    StepResult result;
    result.was_skipped = k == 1;
    result.grad_norm = k == 1 ? INFINITY : 1;
    return result;
  });
  ASSERT_EQ(rates.size(), 4u);
  EXPECT_GT(rates[1], rates[0]);
  EXPECT_EQ(rates[2], rates[1]);
  EXPECT_GT(rates[3], rates[2]);
}

TEST(SingleDevice, LearnsTheBook) {
  Options options;
  options.steps = kSanitized ? 3 : 30;
  const TrainedRun run = train_with(options);
  EXPECT_LT(run.losses.back(), run.losses.front() - (kSanitized ? 0 : 1));
}

TEST(SingleDevice, ASavedModelGoesOnAsIfNothingHadHappened) {
  const TempFolder folder;
  const std::string path = folder / "resume.safetensors";
  Options options = small_options();
  options.optimizer = "sgd";
  options.steps = 2;
  RankContext context(Device::cpu(0));
  RankContext::Scope scope(context);
  SingleDevice first(options, {});
  for (std::int64_t k = 0; k < 2; ++k) first.step(k);
  save_model(path, *first.model().model, first.model().config);
  Options loaded = options;
  loaded.load = path;
  SingleDevice second(loaded, {});
  const double expected = first.step(2).loss;
  EXPECT_EQ(second.step(2).loss, expected);
}

TEST(SingleDevice, ADeviceThatIsTooSmallSaysWhatItHolds) {
  RankContext context(Device::cpu(0, 4 << 20));
  RankContext::Scope scope(context);
  SingleDevice device(Options{}, {});
  expect_error([&] { device.step(0); },
               {"out of memory on cpu:0", "activation", "capacity 4194304"});
}

}  // namespace
}  // namespace shardbook::single_device
