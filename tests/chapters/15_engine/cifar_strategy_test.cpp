// DeepSpeed's example on CIFAR-10 under the engine: equal to one device, and to
// DeepSpeed itself.

#include "chapters/15_engine/cifar_strategy.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "chapters/common/run/option_values.h"
#include "core/ops.h"
#include "tests/core/support.h"
#include "tests/support/on_ranks.h"

namespace shardbook::moe {
namespace {

Options options_of(const CifarOptions& cifar, int ranks) {
  const auto config = cifar_config(cifar);
  Options options;
  options.world_size = ranks;
  options.batch = config.batch.train;
  options.seq = 1;
  options.dtype = cifar.net.dtype;
  options.optimizer = config.optimizer.name();
  options.optimizer_options = config.optimizer.params;
  options.rate = engine::schedule_of(config, config.optimizer);
  options.steps = cifar.dtype == "fp16" ? 12 : 6;
  return options;
}

CifarOptions residual_net() {
  CifarOptions cifar;
  cifar.net.num_experts = {2, 4};
  cifar.net.moe.use_residual = true;
  cifar.net.moe.gate.min_capacity = 0;
  cifar.net.moe.aux_coefficient = 0;
  cifar.dtype = "fp32";
  return cifar;
}

CifarData some_images() {
  return {synthetic_cifar10(64, 1), synthetic_cifar10(10, 2)};
}

/// Losses, norms and the whole model of a training on ranks.
ReferenceRun trained(const CifarOptions& cifar, int ranks) {
  const Options options = options_of(cifar, ranks);
  const CifarData data = some_images();
  return on_ranks(ranks, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, expert_topology(cifar_groups(cifar, ranks)));
    CifarStrategy strategy(options, cifar, data, mesh);
    const TrainingLog log =
        train(options, strategy.optimizer(), false,
              [&](std::int64_t step) { return strategy.step(step); });
    return ReferenceRun{log.losses, log.grad_norms, strategy.full_state()};
  })[0];
}

void expect_equal(const ReferenceRun& a, const ReferenceRun& b,
                  double tolerance) {
  for (std::size_t k = 0; k < b.losses.size(); ++k) {
    EXPECT_NEAR(a.losses[k], b.losses[k], tolerance) << "step " << k;
    EXPECT_NEAR(a.grad_norms[k], b.grad_norms[k], tolerance) << "step " << k;
  }
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_EQ(a.parameters[i].name, b.parameters[i].name);
    EXPECT_LT(
        max_abs_difference(a.parameters[i].tensor, b.parameters[i].tensor),
        tolerance)
        << a.parameters[i].name;
  }
}

// With fp16, as the script sets it, and stage 0.
TEST(Cifar, TheConfigIsTheOneOfTheDocuments) {
  EXPECT_EQ(
      cifar_config({}).to_json(),
      engine::DeepSpeedConfig::read(
          SHARDBOOK_ROOT "/chapters/15_engine/configs/getting_started.json")
          .to_json());
}

class CifarRanks : public testing::TestWithParam<int> {};

// Experts' gradients divided by their replicas' number would fail here with a
// norm that is too large, and so would losses of gates that count twice.
TEST_P(CifarRanks, EqualsOneDeviceAtEveryStage) {
  const int ranks = GetParam();
  CifarOptions cifar = residual_net();
  cifar.net.dtype = DType::kF64;
  cifar.net.moe.aux_coefficient = 0.2;
  const ReferenceRun one =
      train_cifar_reference(options_of(cifar, ranks), cifar, some_images());
  EXPECT_NEAR(one.losses[0], std::log(10), 0.1);
  for (const int ep : {1, 2}) {
    if (ranks % ep != 0) continue;
    for (cifar.stage = 0; cifar.stage < 3; ++cifar.stage) {
      SCOPED_TRACE("ep " + std::to_string(ep) + " stage " +
                   std::to_string(cifar.stage));
      cifar.ep = ep;
      expect_equal(trained(cifar, ranks), one, 1e-9);
    }
  }
}
// A large loss of the gates overflows until the scale has been halved.
TEST_P(CifarRanks, SkipsStepsThatOverflowAsOneDeviceDoes) {
  const int ranks = GetParam();
  CifarOptions cifar = residual_net();
  cifar.dtype = "fp16";
  cifar.net.dtype = DType::kF16;
  cifar.net.moe.aux_coefficient = 80;
  const auto applied_steps = [](const ReferenceRun& run) {
    std::string steps;
    for (const double norm : run.grad_norms) {
      steps += std::isfinite(norm) ? '1' : '0';
    }
    return steps;
  };
  for (cifar.stage = 0; cifar.stage < 3; ++cifar.stage) {
    // Without ZeRO, the first overflow already halves the scale
    const std::string expected = applied_steps(
        train_cifar_reference(options_of(cifar, ranks), cifar, some_images()));
    EXPECT_EQ(expected.front(), '0');
    EXPECT_EQ(expected.back(), '1');
    EXPECT_EQ(applied_steps(trained(cifar, ranks)), expected) << cifar.stage;
  }
}
INSTANTIATE_TEST_SUITE_P(WorldSizes, CifarRanks, testing::Values(1, 2, 4));

TEST(Cifar, OffloadChangesOnlyTheRounding) {
  CifarOptions cifar = residual_net();
  cifar.stage = 2;
  const ReferenceRun without = trained(cifar, 2);
  cifar.cpu_offload = true;
  expect_equal(trained(cifar, 2), without, 1e-6);
}

// An image that fills the last batch does not count.
TEST(Cifar, EveryImageIsCountedOnce) {
  const CifarData data = some_images();
  const auto record = data.training.bytes.begin();
  const CifarOptions cifar = residual_net();
  const double sum = on_ranks(2, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, expert_topology(cifar_groups(cifar, 2)));
    CifarStrategy strategy(options_of(cifar, 2), cifar, data, mesh);
    double sum = 0;
    for (std::uint8_t label = 0; label < 10; ++label) {
      CifarImages same;
      for (int i = 0; i < 5; ++i) {
        same.bytes.push_back(label);
        same.bytes.insert(same.bytes.end(), record + 1, record + kCifarRecord);
      }
      sum += strategy.accuracy(same);
    }
    return sum;
  })[0];
  EXPECT_NEAR(sum, 1, 1e-12);
}

TEST(Cifar, AccuracyDoesNotDependOnTheNumberOfRanks) {
  CifarOptions cifar = residual_net();
  cifar.net.dtype = DType::kF64;
  std::vector<double> found;
  for (const int ranks : {1, 2, 4}) {
    const CifarData data = some_images();
    found.push_back(on_ranks(ranks, [&](ProcessGroup& world) {
      DeviceMesh mesh(world, expert_topology(cifar_groups(cifar, ranks)));
      CifarStrategy strategy(options_of(cifar, ranks), cifar, data, mesh);
      return strategy.accuracy(data.training) +
             100 * strategy.accuracy(data.test);
    })[0]);
  }
  EXPECT_EQ(found[1], found[0]);
  EXPECT_EQ(found[2], found[0]);
}

// --- DeepSpeed's losses ------------------------------------------------------

/// The values of weight() in tests/pytorch/cifar_moe.py.
void fill(ConvNet& net, int ep_rank, int ep, double most) {
  for (const NamedTensor& each : net.named_parameters()) {
    const std::int64_t n = each.tensor.numel();
    const std::int64_t begin = is_expert(each.name) && ep > 1 ? ep_rank * n : 0;
    std::vector<float> values;
    for (std::int64_t i = begin; i < begin + n; ++i) {
      const auto element = static_cast<std::uint64_t>(i);
      const double u =
          (random_bits(0, stream_of(each.name), element) + 0.5) * 0x1p-32;
      values.push_back(static_cast<float>(most * (2 * u - 1)));
    }
    const NoGrad no_grad;
    each.tensor.copy_from(Tensor::from_values(values, each.tensor.shape()));
  }
}

/// The script's loop.
std::vector<double> losses_of(const CifarOptions& cifar, std::int64_t steps,
                              double most, ProcessGroup& world) {
  const int ranks = world.size();
  DeviceMesh mesh(world, expert_topology(cifar_groups(cifar, ranks)));
  ConvNet net(cifar.net, {.ep = &mesh.group("ep")});
  fill(net, mesh.coordinate("ep"), mesh.size("ep"), most);
  const auto made = engine::initialize(net, cifar_config(cifar), world);
  const CifarImages images = synthetic_cifar10(64, 1);
  RandomState& random = RankContext::current().random;
  std::vector<double> losses;
  for (std::int64_t step = 0; step < steps; ++step) {
    random.step = static_cast<std::uint64_t>(step);
    random.batch = {world.rank(), ranks};
    const Batch batch =
        cifar_batch(images, {16 * step + world.rank(), ranks}, 16 / ranks);
    const Tensor loss =
        language_loss((*made.engine)(batch.inputs), batch.targets);
    made.engine->backward(loss);
    made.engine->step();
    losses.push_back(sum_over_ranks(world, loss.item() / ranks, "loss"));
  }
  return losses;
}

// The gates' draws are given to DeepSpeed, so slots, drops and noise are the
// same. Its file names the versions.
TEST(Cifar, LossesEqualDeepSpeeds) {
  std::ifstream file(SHARDBOOK_ROOT
                     "/tests/chapters/15_engine/cifar_losses.txt");
  int num_runs = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    SCOPED_TRACE(line);
    std::istringstream words(line);
    int ranks = 0;
    double most = 0;
    std::string experts, mlp_type, policy;
    CifarOptions cifar = residual_net();
    GateOptions& gate = cifar.net.moe.gate;
    words >> ranks >> cifar.ep >> cifar.stage >> experts >> mlp_type >>
        gate.k >> gate.min_capacity >> policy >> most;
    cifar.net.num_experts = read_counts("experts", experts, "");
    cifar.net.moe.use_residual = mlp_type == "residual";
    gate.noise = policy == "RSample"  ? Noise::kRSample
                 : policy == "Jitter" ? Noise::kJitter
                                      : Noise::kNone;
    std::vector<double> expected;
    for (double each = 0; words >> each;) expected.push_back(each);
    ASSERT_GE(expected.size(), 10u);
    const auto steps = static_cast<std::int64_t>(expected.size());
    const std::vector<double> found = on_ranks(ranks, [&](ProcessGroup& world) {
      return losses_of(cifar, steps, most, world);
    })[0];
    for (std::size_t k = 0; k < expected.size(); ++k) {
      EXPECT_NEAR(found[k], expected[k], 1e-6) << "step " << k;
    }
    ++num_runs;
  }
  EXPECT_GE(num_runs, 9);
}

}  // namespace
}  // namespace shardbook::moe
