// DataParallel against one device: numbers, and its traps.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "core/autograd.h"
#include "tests/chapters/01_data_parallel/data_parallel_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::data_parallel {
namespace {

using namespace test;

// --- Parity -----------------------------------------------------------------

INSTANTIATE_TEST_SUITE_P(WorldSizes, DataParallelParity,
                         testing::ValuesIn(world_sizes()));

TEST_P(DataParallelParity, GradientsEqualOneDeviceForAnySplit) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const std::int64_t rows : {1, 2, 5, 8, 13}) {
      World world(GetParam());
      Probe module(dtype);
      const Tensor x = random_tensor({rows, 6}, 3, dtype);
      const Tensor target = random_tensor({rows, 3}, 4, dtype);
      const Tensors expected = take_grads(module, mse_loss(module(x), target));
      DataParallel model(module, world.devices);
      mse_loss(model(x), target).backward();
      EXPECT_LT(max_relative(grads_of(module), expected),
                dtype == DType::kF64 ? kF64 : kF32)
          << rows << " rows, " << dtype_name(dtype);
    }
  }
}

TEST_P(DataParallelParity, GradientsEqualTheDeviceOrderedChunkSumBitForBit) {
  World world(GetParam());
  Deterministic deterministic;
  const std::int64_t rows = 11;
  const auto chunks = ceil_chunks(rows, GetParam());
  Gpt module(tiny_gpt(), {5, DType::kF32, Device()});
  const Tensor tokens = random_tokens(rows, 6, 32);
  const Tensor targets = random_tokens(rows, 6, 32);

  // Chunk after chunk on one device; the loss is taken on all outputs.
  Tensors outputs;
  for (const auto& [begin, end] : chunks) {
    outputs.push_back(module(tokens.rows_view(begin, end)));
  }
  const Tensor whole = concat(outputs, 0).detach();
  whole.set_requires_grad();
  language_loss(whole, targets).backward();
  Tensors sums(module.parameters().size());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    module.clear_grad();
    autograd::backward({outputs[i]}, {whole.grad().rows_view(
                                         chunks[i].first, chunks[i].second)});
    const Tensors grads = grads_of(module);
    for (std::size_t p = 0; p < grads.size(); ++p) {
      sums[p] = i == 0 ? grads[p] : add(sums[p], grads[p]);
    }
  }

  module.clear_grad();
  DataParallel model(module, world.devices);
  const Tensor logits = model(tokens);
  EXPECT_TRUE(bitwise_equal(logits, whole));
  language_loss(logits, targets).backward();
  const Tensors grads = grads_of(module);
  for (std::size_t p = 0; p < grads.size(); ++p) {
    EXPECT_TRUE(bitwise_equal(grads[p], sums[p])) << "parameter " << p;
  }
}

TEST_P(DataParallelParity, TenStepsEqualOneDevice) {
  for (const char* optimizer : {"sgd", "adamw"}) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      Options options = tiny_options(GetParam(), 5);
      options.model = "mlp";
      options.dtype = dtype;
      options.steps = 10;
      options.optimizer = optimizer;
      if (options.optimizer == "sgd") {
        options.optimizer_options.lr = 0.05;
        options.optimizer_options.momentum = 0.9;
      } else {
        // Above the gradients' rounding, or Adam turns it into full steps.
        options.optimizer_options.eps = 1e-5;
      }
      World world(GetParam());
      DataParallelStrategy strategy(options, world.devices);
      const TrainingLog log =
          train(options, strategy.optimizer(), false,
                [&](std::int64_t step) { return strategy.step(step); });
      const std::vector<NamedTensor> trained = strategy.full_state();
      RankContext one(Device::cpu(0), 0, 1);
      RankContext::Scope alone(one);
      const ReferenceRun reference = train_one_device(options);
      const Parity parity =
          compare_runs(options, {log.losses, {}, trained}, reference);
      EXPECT_TRUE(parity.passed)
          << optimizer << " " << dtype_name(dtype) << " " << parity.max_rel;
      if (GetParam() > 1) continue;
      // One device: the same bits.
      for (std::size_t i = 0; i < reference.parameters.size(); ++i) {
        EXPECT_TRUE(
            bitwise_equal(trained[i].tensor, reference.parameters[i].tensor));
      }
      EXPECT_EQ(log.losses, reference.losses);
    }
  }
}

TEST_P(DataParallelParity, DropoutEqualsOneDevice) {
  World world(GetParam());
  const std::int64_t rows = 7;
  Gpt module(tiny_gpt(0.3), {5, DType::kF64, Device()});
  const Tensor tokens = random_tokens(rows, 6, 32);
  RandomState start;
  start.seed = 9;
  start.step = 4;
  world.context.random = start;
  const Tensor expected = module(tokens);
  const std::uint64_t ops = world.context.random.next_op;
  const Tensors expected_grads = take_grads(module, sum(square(expected)));

  world.context.random = start;
  DataParallel model(module, world.devices);
  const Tensor logits = model(tokens);
  EXPECT_EQ(world.context.random.next_op, ops);
  sum(square(logits)).backward();
  EXPECT_LT(max_relative({logits}, {expected}), kF64);
  EXPECT_LT(max_relative(grads_of(module), expected_grads), kF64);
}

TEST(DataParallelForward, RefusesBlocksThatRecompute) {
  World world(2);
  Gpt module(tiny_gpt(), {5, DType::kF64, Device()});
  set_recompute(module, true);
  const Tensor tokens = random_tokens(4, 6, 32);
  expect_text(error_of([&] { DataParallel(module, world.devices)(tokens); }),
              {"'transformer.h.0' recomputes its activations"});
  DataParallel(module, {world.devices[0]})(tokens);
}

TEST(DataParallelForward, AccumulatesOverSeveralForwards) {
  World world(2);
  Probe module;
  const Tensor a = random_tensor({3, 6}, 3), b = random_tensor({4, 6}, 4);
  const Tensors expected =
      take_grads(module, add(sum(square(module(a))), sum(square(module(b)))));
  DataParallel model(module, world.devices);
  const Tensor first = sum(square(model(a)));
  add(first, sum(square(model(b)))).backward();
  EXPECT_LT(max_relative(grads_of(module), expected), kF64);
}

TEST(DataParallelForward, AParameterThatNoReplicaUsedHasNoGradient) {
  World world(3);
  Probe module;
  DataParallel model(module, world.devices);
  const Tensor y =
      model(random_tensor({6, 6}, 3), [](Module& m, const Tensor& x) {
        return dynamic_cast<Probe&>(m).fc1(x);
      });
  sum(square(y)).backward();
  EXPECT_TRUE(module.fc1.weight.grad().defined());
  EXPECT_FALSE(module.fc2.weight.grad().defined());
}

TEST(DataParallelForward, AParameterThatOneReplicaUsedHasItsGradient) {
  World world(3);
  Probe module;
  const Tensor x = random_tensor({6, 6}, 3);
  const Tensors expected =
      take_grads(module, sum(square(module(x.rows_view(2, 4)))));
  DataParallel model(module, world.devices);
  const Tensor y = model(x, [](Module& m, const Tensor& rows) {
    const bool uses = RankContext::current().device.index() == 1;
    return uses ? m(rows) : Tensor::zeros({2, 3}, rows.options());
  });
  sum(square(y)).backward();
  EXPECT_LT(max_relative(grads_of(module), expected), kF64);
}

// --- BatchNorm --------------------------------------------------------------

TEST(DataParallelBatchNorm, RunningStatisticsAreThoseOfReplicaZero) {
  World world(3);
  const InitOptions init{1, DType::kF64, Device()};
  BatchNorm module(4, init), first(4, init), all(4, init);
  const Tensor x = random_tensor({7, 4}, 3);
  first(x.rows_view(0, 3));
  all(x);
  DataParallel(module, world.devices)(x);
  EXPECT_LT(max_relative({module.running_mean}, {first.running_mean}), kF64);
  EXPECT_LT(max_relative({module.running_var}, {first.running_var}), kF64);
  // Statistics are per chunk and differ from the whole batch's.
  EXPECT_GT(max_relative({module.running_mean}, {all.running_mean}), 1e-3);
}

TEST(DataParallelBatchNorm, BuffersAreSentWithEveryForward) {
  World world(3);
  BatchNorm module(4, {1, DType::kF64, Device()});
  const Tensor x = random_tensor({6, 4}, 3);
  DataParallel model(module, world.devices);
  model(x);
  module.train(false);
  EXPECT_LT(max_relative({model(x)}, {module(x)}), kF64);
}

// --- Traps: the wrong way must differ ---------------------------------------

TEST(DataParallelTrap, MeanOverDevicesWeightsAnUnevenChunkWrongly) {
  World world(3);
  Probe module;
  const Tensor x = random_tensor({7, 6}, 3), target = random_tensor({7, 3}, 4);
  const double expected = mse_loss(module(x), target).item();
  DataParallel model(module, world.devices);
  const Tensors targets = scatter(target, world.devices);
  const Tensor losses = model(x, [&](Module& m, const Tensor& rows) {
    const int device = RankContext::current().device.index();
    return mse_loss(m(rows), targets[static_cast<std::size_t>(device)]);
  });
  ASSERT_EQ(losses.shape(), Shape{3});
  EXPECT_GT(std::abs(mean(losses).item() - expected), 1e-3);
  // Each loss is weighted by the rows of its chunk: 3, 3, 1.
  const Tensor weights = Tensor::from_values<double>({3, 3, 1}, {3});
  EXPECT_NEAR(sum(mul(losses, weights)).item() / 7, expected, 1e-12);
}

TEST(DataParallelTrap, AveragedGradientsAreTooSmall) {
  World world(4);
  Probe module;
  const Tensor x = random_tensor({8, 6}, 3), target = random_tensor({8, 3}, 4);
  const Tensors expected = take_grads(module, mse_loss(module(x), target));
  DataParallel model(module, world.devices);
  mse_loss(model(x), target).backward();
  Tensors averaged;
  for (const Tensor& grad : grads_of(module)) {
    averaged.push_back(scale(grad, 1.0 / 4));
  }
  EXPECT_GT(max_relative(averaged, expected), 0.5);
}

TEST(DataParallelTrap, OldReplicasKeepOldWeights) {
  World world(2);
  Probe module;
  const Tensor x = random_tensor({4, 6}, 3);
  const Replicas kept = replicate(module, world.devices);
  {
    NoGrad no_grad;
    for (const Tensor& parameter : module.parameters()) {
      parameter.copy_from(scale(parameter, 1.5));
    }
  }
  const Tensor expected = module(x);
  const auto chunks = scatter(x, world.devices);
  const Tensor stale =
      gather(parallel_apply(kept, chunks, world.devices), world.devices[0]);
  EXPECT_GT(max_relative({stale}, {expected}), 1e-3);
  DataParallel model(module, world.devices);
  EXPECT_LT(max_relative({model(x)}, {expected}), kF64);
}

TEST(DataParallelDevices, OutputsMeetOnTheOutputDevice) {
  World world(3);
  Linear model("0", 4, 2, {1, DType::kF64, Device()});
  const Tensor x = random_tensor({6, 4}, 1);
  for (const std::size_t i : {0, 2}) {
    DataParallel parallel(model, world.devices, world.devices[i]);
    const Tensor y = parallel(x);
    EXPECT_EQ(y.device(), world.devices[i]);
    EXPECT_TRUE(bitwise_equal(to_device(y, world.devices[0]), model(x)));
  }
  EXPECT_EQ(DataParallel(model, world.devices)(x).device(), world.devices[0]);
}

}  // namespace
}  // namespace shardbook::data_parallel
