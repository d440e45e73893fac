// DataParallel against one device: numbers, bytes, memory, and its traps.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "chapters/01_data_parallel/bill.h"
#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/01_data_parallel/trainer.h"
#include "chapters/common/run/device_trace.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "tests/support/temp_folder.h"

namespace shardbook::data_parallel {
namespace {

// One step adds the same products in another order.
constexpr double kF64 = 1e-10;
constexpr double kF32 = 1e-5;

std::vector<Device> make_devices(int n, std::int64_t capacity = 0) {
  std::vector<Device> devices;
  for (int i = 0; i < n; ++i) devices.push_back(Device::cpu(i, capacity));
  return devices;
}

/// A context on device 0 of `n` for the length of a test.
struct World {
  explicit World(int n)
      : devices(make_devices(n)), context(devices[0], 0, 1), scope(context) {}
  std::vector<Device> devices;
  RankContext context;
  RankContext::Scope scope;
};

Tensor random_tensor(const Shape& shape, std::uint64_t stream,
                     DType dtype = DType::kF64) {
  Tensor x = Tensor::empty(shape, {dtype, Device()});
  fill_normal(x, 7, stream, 0, 1);
  return x;
}

Tensor random_tokens(std::int64_t rows, std::int64_t seq, std::int64_t vocab) {
  std::vector<std::int64_t> values;
  std::uint64_t state = 12345;
  for (std::int64_t i = 0; i < rows * seq; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    values.push_back(static_cast<std::int64_t>((state >> 33) % vocab));
  }
  return Tensor::from_values<std::int64_t>(values, {rows, seq});
}

/// Three linear layers, with what a test wants to see of its replicas.
class Probe : public ModuleOf<Probe> {
 public:
  explicit Probe(DType dtype = DType::kF64)
      : fc1("fc1", 6, 10, {1, dtype, Device()}),
        fc2("fc2", 10, 10, {1, dtype, Device()}),
        fc3("fc3", 10, 3, {1, dtype, Device()}) {}
  Tensor forward(const Tensor& x) override {
    ++calls;
    return fc3(tanh(fc2(tanh(fc1(x)))));
  }
  void members(MemberVisitor& visit) override {
    visit.module("fc1", fc1);
    visit.module("fc2", fc2);
    visit.module("fc3", fc3);
  }
  Linear fc1, fc2, fc3;
  int calls = 0;
};

Tensors grads_of(Module& module) {
  Tensors grads;
  for (const Tensor& parameter : module.parameters()) {
    grads.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                               : Tensor());
  }
  return grads;
}

double max_relative(const Tensors& a, const Tensors& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined() || !b[i].defined()) {
      EXPECT_EQ(a[i].defined(), b[i].defined()) << "gradient " << i;
      continue;
    }
    double scale = 1e-300;
    for (double v : b[i].to_vector<double>()) {
      scale = std::max(scale, std::abs(v));
    }
    worst = std::max(worst, max_abs_difference(a[i], b[i]) / scale);
  }
  return worst;
}

/// What a call throws, or "".
template <typename F>
std::string error_of(const F& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Options tiny_options(int n, std::int64_t batch) {
  Options options;
  options.chapter = "01_data_parallel";
  options.world_size = n;
  options.batch = batch;
  options.seq = 6;
  options.data = "random";
  options.dtype = DType::kF64;
  options.steps = 3;
  return options;
}

ModelConfig tiny_gpt(double dropout = 0) {
  ModelConfig config;
  config.vocab_size = 32;
  config.n_positions = 8;
  config.n_embd = 8;
  config.n_layer = 2;
  config.n_head = 2;
  config.dropout = dropout;
  return config;
}

// --- Splitting --------------------------------------------------------------

TEST(DataParallelChunks, FollowTheCeilRule) {
  using Ranges = std::vector<RowRange>;
  EXPECT_EQ(ceil_chunks(5, 4), (Ranges{{0, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(ceil_chunks(8, 4), (Ranges{{0, 2}, {2, 4}, {4, 6}, {6, 8}}));
  EXPECT_EQ(ceil_chunks(2, 4), (Ranges{{0, 1}, {1, 2}}));
  EXPECT_EQ(ceil_chunks(7, 3), (Ranges{{0, 3}, {3, 6}, {6, 7}}));
  EXPECT_EQ(ceil_chunks(0, 3), (Ranges{{0, 0}}));
  EXPECT_THROW(ceil_chunks(-1, 3), Error);
  EXPECT_THROW(ceil_chunks(3, 0), Error);
}

TEST(DataParallelChunks, CoalesceClosesAChunkWhenItIsFull) {
  World world(1);
  // 80, 80, 8, 240, 8 bytes of f64, and one f32 tensor in between.
  const Tensors tensors = {random_tensor({10}, 0),
                           random_tensor({10}, 1),
                           random_tensor({3}, 2, DType::kF32),
                           random_tensor({1}, 3),
                           random_tensor({30}, 4),
                           random_tensor({1}, 5)};
  using Chunks = std::vector<std::vector<std::size_t>>;
  EXPECT_EQ(coalesce(tensors, 160), (Chunks{{0, 1}, {3, 4}, {5}, {2}}));
  EXPECT_EQ(coalesce(tensors, 1), (Chunks{{0}, {1}, {2}, {3}, {4}, {5}}));
  EXPECT_EQ(coalesce(tensors).size(), 2u);
  EXPECT_TRUE(coalesce({}).empty());
}

// --- Scatter and gather -----------------------------------------------------

TEST(DataParallelScatter, CutsTensorsAndSharesObjects) {
  World world(3);
  auto number = std::make_shared<int>(42);
  const Tensor x = random_tensor({7, 2}, 1);
  const Tensor y = random_tensor({7}, 2);
  const Value inputs(Value::List{
      Value(x),
      Value(Value::Dictionary{{"y", Value(y)}, {"n", Value::of(number)}})});
  const std::vector<Value> parts = scatter(inputs, world.devices);
  ASSERT_EQ(parts.size(), 3u);
  const std::vector<std::int64_t> rows = {3, 3, 1};
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const Tensor& part = parts[i][0].tensor();
    EXPECT_TRUE(part.device() == world.devices[i]);
    EXPECT_EQ(part.size(0), rows[i]);
    EXPECT_TRUE(bitwise_equal(part, x.rows_view(begin, begin + rows[i])));
    EXPECT_TRUE(bitwise_equal(parts[i][1]["y"].tensor(),
                              y.rows_view(begin, begin + rows[i])));
    EXPECT_EQ(parts[i][1]["n"].object_as<int>(), number);
    begin += rows[i];
  }
  // What is on its device already is not copied.
  EXPECT_TRUE(parts[0][0].tensor().shares_storage(x));
}

TEST(DataParallelScatter, ReachesAllDevicesWithoutTensors) {
  World world(3);
  auto number = std::make_shared<int>(1);
  EXPECT_EQ(scatter(Value::of(number), world.devices).size(), 3u);
}

TEST(DataParallelScatter, RefusesScalarsAndDifferentRows) {
  World world(4);
  EXPECT_TRUE(
      contains(error_of([&] { scatter(Tensor::full({}, 1), world.devices); }),
               "has no dim 0"));
  const Value uneven(Value::List{Value(random_tensor({8, 1}, 0)),
                                 Value(random_tensor({2, 1}, 1))});
  EXPECT_TRUE(contains(error_of([&] { scatter(uneven, world.devices); }),
                       "4 and 2 chunks"));
}

TEST(DataParallelScatter, GathersTheGradient) {
  for (const std::int64_t dim : {0, 1, -1}) {
    World world(3);
    const Tensor x = random_tensor({5, 4}, 1);
    x.set_requires_grad();
    const std::vector<Device> devices = world.devices;
    const double error = autograd::check_gradients(
        [&](const Tensors& in) {
          Tensor total;
          // Each piece is weighted in its own way; the second not at all.
          const auto parts = scatter(in[0], devices, dim);
          for (std::size_t i = 0; i < parts.size(); ++i) {
            if (i == 1) continue;
            const Tensor part = to_device(
                sum(scale(square(parts[i].tensor()), 1.0 + i)), devices[0]);
            total = total.defined() ? add(total, part) : part;
          }
          return total;
        },
        {x});
    EXPECT_LT(error, 1e-6) << "dim " << dim;
  }
}

TEST(DataParallelGather, IsTheInverseOfScatter) {
  for (const std::int64_t dim : {0, 1, 2}) {
    World world(3);
    const Tensor x = random_tensor({5, 4, 7}, 1);
    const Value back =
        gather(scatter(x, world.devices, dim), world.devices[0], dim);
    EXPECT_TRUE(bitwise_equal(back.tensor(), x)) << "dim " << dim;
  }
}

TEST(DataParallelGather, ScattersTheGradient) {
  for (const std::int64_t dim : {0, 1}) {
    World world(3);
    Tensors parts;
    for (std::size_t i = 0; i < 3; ++i) {
      const Tensor part =
          to_device(random_tensor({2 + static_cast<int>(i) * (dim == 0), 2}, i),
                    world.devices[i]);
      parts.push_back(part.set_requires_grad());
    }
    const double error = autograd::check_gradients(
        [&](const Tensors& in) {
          const Tensor whole =
              gather({in.begin(), in.end()}, world.devices[2], dim).tensor();
          EXPECT_TRUE(whole.device() == world.devices[2]);
          return sum(mul(whole, square(whole)));
        },
        parts);
    EXPECT_LT(error, 1e-6) << "dim " << dim;
  }
}

TEST(DataParallelGather, MakesAVectorOfScalars) {
  World world(3);
  std::vector<Value> outputs;
  for (int i = 0; i < 3; ++i) {
    outputs.push_back(
        to_device(Tensor::full({}, i + 1, {DType::kF64}), world.devices[i]));
  }
  const Tensor all = gather(outputs, world.devices[0]).tensor();
  EXPECT_EQ(all.to_vector<double>(), (std::vector<double>{1, 2, 3}));
}

TEST(DataParallelGather, JoinsListsAndDictionariesByEntry) {
  World world(2);
  auto output = [&](int i) {
    return Value(Value::Dictionary{
        {"a", Value(to_device(Tensor::full({1, 2}, i), world.devices[i]))},
        {"b", Value(Value::List{Value(
                  to_device(Tensor::full({2, 1}, 10 + i), world.devices[i]))})},
        {"none", Value()}});
  };
  const Value all = gather({output(0), output(1)}, world.devices[0]);
  EXPECT_EQ(all["a"].tensor().to_vector<double>(),
            (std::vector<double>{0, 0, 1, 1}));
  EXPECT_EQ(all["b"][0].tensor().to_vector<double>(),
            (std::vector<double>{10, 10, 11, 11}));
  EXPECT_TRUE(all["none"].is_object());
}

TEST(DataParallelGather, RefusesWhatCannotBeJoined) {
  World world(2);
  const Value tensor(random_tensor({2, 3}, 0));
  EXPECT_TRUE(contains(error_of([&] {
                         gather({tensor, Value()}, world.devices[0]);
                       }),
                       "a tensor"));
  auto object = Value::of(std::make_shared<int>(1));
  EXPECT_TRUE(contains(error_of([&] {
                         gather({object, object}, world.devices[0]);
                       }),
                       "cannot be joined"));
  EXPECT_TRUE(contains(
      error_of([&] {
        gather({tensor, Value(random_tensor({2, 4}, 0))}, world.devices[0]);
      }),
      "shapes [2, 3] and [2, 4]"));
}

// --- Replicate --------------------------------------------------------------

TEST(DataParallelReplicate, ReplicaZeroSharesStorageAndOthersCopy) {
  World world(3);
  Probe module;
  const Replicas replicas = replicate(module, world.devices);
  const Tensors base = module.parameters();
  for (std::size_t d = 0; d < 3; ++d) {
    const Tensors copies = replicas[d]->parameters();
    ASSERT_EQ(copies.size(), base.size());
    for (std::size_t i = 0; i < base.size(); ++i) {
      EXPECT_TRUE(copies[i].device() == world.devices[d]);
      EXPECT_TRUE(bitwise_equal(copies[i], base[i]));
      EXPECT_EQ(copies[i].shares_storage(base[i]), d == 0);
      EXPECT_FALSE(copies[i].is_leaf());
    }
  }
}

TEST(DataParallelReplicate, KeepsFrozenParametersOutOfTheGraph) {
  World world(2);
  Probe module;
  module.fc1.set_requires_grad(false);
  DataParallel model(module, world.devices);
  sum(square(model(random_tensor({4, 6}, 1)))).backward();
  EXPECT_FALSE(module.fc1.weight.grad().defined());
  EXPECT_TRUE(module.fc2.weight.grad().defined());
}

TEST(DataParallelReplicate, NamesTheParameterOnAnotherDevice) {
  World world(2);
  Probe module;
  module.fc2.bias = to_device(module.fc2.bias.detach(), world.devices[1]);
  DataParallel model(module, world.devices);
  EXPECT_TRUE(contains(error_of([&] {
                         model(random_tensor({4, 6}, 1));
                       }),
                       "'fc2.bias' is on cpu:1"));
}

TEST(DataParallelReplicate, NamesTheBufferOnAnotherDevice) {
  World world(2);
  BatchNorm module(3, {1, DType::kF64, Device()});
  module.running_mean = to_device(module.running_mean, world.devices[1]);
  DataParallel model(module, world.devices);
  EXPECT_TRUE(contains(error_of([&] {
                         model(random_tensor({4, 3}, 1));
                       }),
                       "'running_mean' is on cpu:1"));
}

TEST(DataParallelReplicate, DiesWithTheGraph) {
  World world(2);
  Probe module;
  {
    DataParallel model(module, world.devices);
    Tensor loss = sum(square(model(random_tensor({4, 6}, 1))));
    EXPECT_GT(world.devices[1].memory().current(MemoryKind::kParameter), 0);
    loss.backward();
  }
  EXPECT_EQ(world.devices[1].memory().current_total, 0);
  // Also when no backward comes.
  { DataParallel(module, world.devices)(random_tensor({4, 6}, 1)); }
  EXPECT_EQ(world.devices[1].memory().current_total, 0);
}

/// Its backward belongs to the module that ran the forward.
class Owned : public ModuleOf<Owned> {
 public:
  Owned() : fc("fc", 6, 3, {1, DType::kF64, Device()}) {}
  Owned(const Owned& other)
      : ModuleOf<Owned>(other), fc(other.fc), num_lost(other.num_lost) {}
  Tensor forward(const Tensor& x) override {
    const std::weak_ptr<int> self = life_;
    return autograd::custom_function(
        "owned", {fc(x)}, [](const Tensors& y) { return y; },
        [self, count = num_lost](const Tensors& grads) {
          if (self.expired()) ++*count;
          return grads;
        })[0];
  }
  void members(MemberVisitor& visit) override { visit.module("fc", fc); }

  Linear fc;
  /// Backwards whose module had gone; shared by all copies.
  std::shared_ptr<std::atomic<int>> num_lost =
      std::make_shared<std::atomic<int>>(0);

 private:
  std::shared_ptr<int> life_ = std::make_shared<int>();
};

TEST(DataParallelReplicate, LivesAsLongAsBackwardMayNeedIt) {
  World world(3);
  Owned module;
  Tensor loss;
  {
    DataParallel model(module, world.devices);
    loss = sum(square(model(random_tensor({6, 6}, 1))));
  }
  loss.backward();
  EXPECT_EQ(*module.num_lost, 0);
  // The same where a caller's own forward returns several outputs
  DataParallel model(module, world.devices);
  const Value both = model(
      Value(random_tensor({6, 6}, 1)), [](Module& replica, const Value& x) {
        return Value(Value::Dictionary{{"y", call_module(replica, x)}});
      });
  sum(square(both["y"].tensor())).backward();
  EXPECT_EQ(*module.num_lost, 0);
}

// --- Parallel apply ---------------------------------------------------------

TEST(DataParallelApply, RunsReplicasOnThreadsOfTheirOwn) {
  World world(3);
  Probe module;
  DataParallel model(module, world.devices);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::vector<int> devices;
  model(Value(random_tensor({6, 6}, 1)), [&](Module& m, const Value& x) {
    std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
    devices.push_back(RankContext::current().device.index());
    return call_module(m, x);
  });
  EXPECT_EQ(threads.size(), 3u);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0u);
  std::sort(devices.begin(), devices.end());
  EXPECT_EQ(devices, (std::vector<int>{0, 1, 2}));
}

TEST(DataParallelApply, RethrowsTheFirstErrorAfterAllHaveEnded) {
  World world(4);
  Probe module;
  DataParallel model(module, world.devices);
  std::atomic<int> ended{0};
  const std::string error = error_of([&] {
    model(Value(random_tensor({8, 6}, 1)), [&](Module&, const Value& x) {
      const int device = RankContext::current().device.index();
      if (device == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      ++ended;
      SB_CHECK(device == 0 || device == 3, "no luck on ", device);
      return x;
    });
  });
  EXPECT_EQ(error, "replica 1 on cpu:1: no luck on 1");
  EXPECT_EQ(ended, 4);
}

TEST(DataParallelApply, PassesGradModeOn) {
  World world(2);
  Probe module;
  DataParallel model(module, world.devices);
  NoGrad no_grad;
  EXPECT_FALSE(model(random_tensor({4, 6}, 1)).requires_grad());
}

TEST(DataParallelApply, OutOfMemoryNamesTheReplica) {
  std::vector<Device> devices = {Device::cpu(0), Device::cpu(1, 3000)};
  RankContext context(devices[0]);
  RankContext::Scope scope(context);
  Probe module;
  DataParallel model(module, devices);
  const std::string error = error_of([&] { model(random_tensor({40, 6}, 1)); });
  EXPECT_TRUE(contains(error, "out of memory on cpu:1")) << error;
}

TEST(DataParallelApply, HooksRunOncePerReplica) {
  World world(3);
  Probe module;
  std::atomic<int> forward{0}, accumulated{0};
  module.add_forward_hook([&](Module&, Tensors&) { ++forward; });
  module.fc1.weight.add_accumulate_hook([&](Tensor&) { ++accumulated; });
  DataParallel model(module, world.devices);
  sum(model(random_tensor({6, 6}, 1))).backward();
  EXPECT_EQ(forward, 3);
  // The parameter itself receives one gradient, the sum.
  EXPECT_EQ(accumulated, 1);
}

TEST(DataParallelApply, AttributeWritesOfReplicasAreLost) {
  World world(2);
  Probe module;
  DataParallel(module, world.devices)(random_tensor({4, 6}, 1));
  EXPECT_EQ(module.calls, 0);
  DataParallel(module, {world.devices[0]})(random_tensor({4, 6}, 1));
  EXPECT_EQ(module.calls, 1);
}

// --- Parity -----------------------------------------------------------------

class DataParallelParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, DataParallelParity,
                         testing::Values(1, 2, 3, 4, 8));

TEST_P(DataParallelParity, GradientsEqualOneDeviceForAnySplit) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const std::int64_t rows : {1, 2, 5, 8, 13}) {
      World world(GetParam());
      Probe module(dtype);
      const Tensor x = random_tensor({rows, 6}, 3, dtype);
      const Tensor target = random_tensor({rows, 3}, 4, dtype);
      mse_loss(module(x), target).backward();
      const Tensors expected = grads_of(module);
      module.clear_grad();
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
  Tensors sums;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    module.clear_grad();
    autograd::backward({outputs[i]}, {whole.grad().rows_view(
                                         chunks[i].first, chunks[i].second)});
    const Tensors grads = grads_of(module);
    for (std::size_t p = 0; p < grads.size(); ++p) {
      if (i == 0) {
        sums.push_back(grads[p]);
      } else {
        sums[p] = add(sums[p], grads[p]);
      }
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
        // Above the rounding of gradients, or Adam makes whole steps of it.
        options.optimizer_options.eps = 1e-5;
      }
      World world(GetParam());
      const LoadedModel loaded = build_model(options);
      const Dataset data = Dataset::open("random", options.seq, 256, 0);
      const auto optim = make_optimizer(optimizer, loaded.model->parameters(),
                                        options.optimizer_options);
      DataParallel model(*loaded.model, world.devices);
      const TrainingLog log =
          train(options, *optim, false, [&](std::int64_t step) {
            return train_step(options, model, *optim, data, step);
          });
      RankContext one(Device::cpu(0), 0, 1);
      RankContext::Scope alone(one);
      const ReferenceRun reference = train_one_device(options);
      const Parity parity = compare_with_one_device(
          options, log.losses, loaded.model->named_parameters(), reference);
      EXPECT_TRUE(parity.passed)
          << optimizer << " " << dtype_name(dtype) << " " << parity.max_rel;
      if (GetParam() > 1) continue;
      // One device: the same bits.
      for (std::size_t i = 0; i < reference.parameters.size(); ++i) {
        EXPECT_TRUE(bitwise_equal(loaded.model->named_parameters()[i].tensor,
                                  reference.parameters[i].tensor));
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
  sum(square(expected)).backward();
  const Tensors expected_grads = grads_of(module);
  module.clear_grad();

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
  EXPECT_TRUE(
      contains(error_of([&] { DataParallel(module, world.devices)(tokens); }),
               "'transformer.h.0' recomputes its activations"));
  DataParallel(module, {world.devices[0]})(tokens);
}

TEST_P(DataParallelParity, InputsReceiveGradients) {
  World world(GetParam());
  Probe module;
  const Tensor x = random_tensor({5, 6}, 3);
  x.set_requires_grad();
  sum(square(module(x))).backward();
  const Tensor expected = x.grad().clone();
  x.clear_grad();
  DataParallel model(module, world.devices);
  sum(square(model(x))).backward();
  EXPECT_LT(max_relative({x.grad()}, {expected}), kF64);
}

TEST(DataParallelForward, CutsOtherDims) {
  World world(3);
  Probe module;
  const Tensor x = random_tensor({2, 7, 6}, 3);
  const Tensor expected = module(x);
  DataParallel model(module, world.devices, Device(), 1);
  EXPECT_LT(max_relative({model(x)}, {expected}), kF64);
}

TEST(DataParallelForward, GathersWhereItIsTold) {
  World world(3);
  Probe module;
  const Tensor x = random_tensor({6, 6}, 3);
  mse_loss(module(x), random_tensor({6, 3}, 1)).backward();
  const Tensors expected = grads_of(module);
  module.clear_grad();
  const Tensor target = to_device(random_tensor({6, 3}, 1), world.devices[2]);
  DataParallel model(module, world.devices, world.devices[2]);
  const Tensor y = model(x);
  EXPECT_TRUE(y.device() == world.devices[2]);
  mse_loss(y, target).backward();
  EXPECT_LT(max_relative(grads_of(module), expected), kF64);
}

TEST(DataParallelForward, TakesListsOfTensorsAndForwardsOfTheCaller) {
  World world(2);
  Probe module;
  const Tensor x = random_tensor({4, 6}, 3);
  const Tensor y =
      data_parallel(module, Value(Value::List{Value(x)}), world.devices)[0]
          .tensor();
  EXPECT_LT(max_relative({y}, {module(x)}), kF64);
  auto factor = std::make_shared<double>(2.0);
  DataParallel model(module, world.devices);
  const Value out =
      model(Value(Value::Dictionary{{"x", Value(x)}, {"f", Value::of(factor)}}),
            [](Module& m, const Value& in) {
              const Tensor z = m(in["x"].tensor());
              return Value(Value::Dictionary{
                  {"z", Value(scale(z, *in["f"].object_as<double>()))}});
            });
  EXPECT_LT(max_relative({out["z"].tensor()}, {scale(module(x), 2)}), kF64);
}

TEST(DataParallelForward, AccumulatesOverSeveralForwards) {
  World world(2);
  Probe module;
  const Tensor a = random_tensor({3, 6}, 3), b = random_tensor({4, 6}, 4);
  add(sum(square(module(a))), sum(square(module(b)))).backward();
  const Tensors expected = grads_of(module);
  module.clear_grad();
  DataParallel model(module, world.devices);
  const Tensor first = sum(square(model(a)));
  add(first, sum(square(model(b)))).backward();
  EXPECT_LT(max_relative(grads_of(module), expected), kF64);
}

TEST(DataParallelForward, AParameterThatNoReplicaUsedHasNoGradient) {
  World world(3);
  Probe module;
  DataParallel model(module, world.devices);
  const Value y =
      model(Value(random_tensor({6, 6}, 3)), [](Module& m, const Value& x) {
        auto& probe = dynamic_cast<Probe&>(m);
        return Value(probe.fc1(x.tensor()));
      });
  sum(square(y.tensor())).backward();
  EXPECT_TRUE(module.fc1.weight.grad().defined());
  EXPECT_FALSE(module.fc2.weight.grad().defined());
}

TEST(DataParallelForward, AParameterThatOneReplicaUsedHasItsGradient) {
  World world(3);
  Probe module;
  const Tensor x = random_tensor({6, 6}, 3);
  sum(square(module(x.rows_view(2, 4)))).backward();
  const Tensors expected = grads_of(module);
  module.clear_grad();
  DataParallel model(module, world.devices);
  const Value y = model(Value(x), [](Module& m, const Value& rows) {
    if (RankContext::current().device.index() == 1) {
      return call_module(m, rows);
    }
    return Value(Tensor::zeros({2, 3}, rows.tensor().options()));
  });
  sum(square(y.tensor())).backward();
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
  // Statistics are per chunk: they are not those of the batch.
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

// --- The bill ---------------------------------------------------------------

double total_sent(const DataParallel& model) {
  double total = 0;
  for (const Device& device : model.device_ids()) {
    total += bytes_sent(model.ledger()->records(device));
  }
  return total;
}

TEST_P(DataParallelParity, BytesFollowTheFormula) {
  for (const std::int64_t rows : {1, 5, 8, 16}) {
    World world(GetParam());
    Probe module;
    DataParallel model(module, world.devices);
    sum(square(model(random_tensor({rows, 6}, 3)))).backward();
    double parameter_bytes = 0;
    for (const Tensor& parameter : module.parameters()) {
      parameter_bytes += static_cast<double>(parameter.bytes());
    }
    const auto traffic =
        step_traffic(rows, GetParam(), 6 * 8, 3 * 8, parameter_bytes, 0);
    const auto chunks = ceil_chunks(rows, GetParam());
    const double used = static_cast<double>(chunks.size());
    const double elsewhere =
        1 - static_cast<double>(chunks[0].second) / static_cast<double>(rows);
    for (std::size_t i = 0; i < world.devices.size(); ++i) {
      EXPECT_EQ(bytes_sent(model.ledger()->records(world.devices[i])),
                traffic[i].total());
    }
    const double x = static_cast<double>(rows) * 48;
    const double y = static_cast<double>(rows) * 24;
    EXPECT_NEAR(total_sent(model),
                elsewhere * (x + 2 * y) + 2 * (used - 1) * parameter_bytes,
                1e-6);
    // The cost model of the ledger agrees on the group's total when all pieces
    // are even.
    if (rows % static_cast<std::int64_t>(used) != 0) continue;
    double model_total = 0;
    for (const Device& device : world.devices) {
      const auto records = model.ledger()->records(device);
      for (const CommRecord& record : records) {
        model_total += wire_bytes(record);
      }
    }
    EXPECT_NEAR(model_total, total_sent(model), 1e-6);
  }
}

TEST(DataParallelBill, LogHasOneScatterOneGatherAndOneScatterBack) {
  World world(3);
  Probe module;
  DataParallel model(module, world.devices);
  sum(square(model(random_tensor({5, 6}, 3)))).backward();
  for (std::size_t i = 0; i < 3; ++i) {
    const auto records = model.ledger()->records(world.devices[i]);
    std::vector<std::string> text;
    for (const CommRecord& record : records) {
      text.push_back(std::string(phase_name(record.phase)) + " " +
                     record_text(record));
      EXPECT_EQ(record.root_or_peer, 0);
    }
    const std::string who = "(rank " + std::to_string(i) + " of 3) ";
    EXPECT_EQ(
        text,
        (std::vector<std::string>{
            "forward scatter f64[30] over devices " + who + "'inputs'",
            "forward broadcast f64[213] over devices " + who + "'parameters'",
            "forward gather f64[15] over devices " + who + "'outputs'",
            "backward scatter f64[15] over devices " + who +
                "'output gradients'",
            "backward reduce f64[213] over devices " + who + "'gradients'"}));
  }
}

TEST(DataParallelBill, BuffersTravelForwardOnly) {
  World world(4);
  BatchNorm module(5, {1, DType::kF64, Device()});
  DataParallel model(module, world.devices);
  sum(square(model(random_tensor({8, 5}, 3)))).backward();
  // 10 values of parameters there and back, 10 of buffers there.
  const auto traffic = step_traffic(8, 4, 40, 40, 80, 80);
  EXPECT_EQ(traffic[0].replicate, 3 * 160);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(bytes_sent(model.ledger()->records(world.devices[i])),
              traffic[i].total());
  }
}

TEST(DataParallelBill, OneDeviceRecordsNothing) {
  World world(1);
  Probe module;
  DataParallel model(module, world.devices);
  sum(square(model(random_tensor({5, 6}, 3)))).backward();
  EXPECT_TRUE(model.ledger()->records(world.devices[0]).empty());
}

TEST(DataParallelBill, TheMainDeviceIsTheHotSpot) {
  // GPT-nano on four devices: main sends three copies of the weights, the
  // inputs and the output gradients; each other device sends its own.
  const auto traffic = step_traffic(24, 4, 512, 65536, 1e6, 0);
  EXPECT_EQ(traffic[0].total(), 3e6 + 18 * 512.0 + 18 * 65536.0);
  EXPECT_EQ(traffic[1].total(), 1e6 + 6 * 65536.0);
  double into_main = 0;
  for (std::size_t i = 1; i < 4; ++i) into_main += traffic[i].total();
  double all = into_main + traffic[0].total();
  // Everything enters or leaves it: no byte goes past the main device.
  EXPECT_EQ(all, 2 * 3e6 + 18 * (512.0 + 2 * 65536.0));
}

TEST_P(DataParallelParity, MemoryFollowsTheFormula) {
  // A vocabulary below the width: the widest point is inside the last block.
  const std::string narrow =
      R"({"model_type": "gpt2", "vocab_size": 50, "n_positions": 16,
          "n_embd": 64, "n_layer": 3, "n_head": 4})";
  struct Case {
    std::string name;
    double dropout;
  };
  for (const auto& [name, dropout] :
       {Case{"mlp", 0}, Case{"gpt-nano", 0}, Case{"gpt-nano", 0.5},
        Case{narrow, 0}, Case{narrow, 0.5}}) {
    for (const std::int64_t batch : {5, 8}) {
      Options options = tiny_options(GetParam(), batch);
      options.model = name;
      options.dropout = dropout;
      options.dtype = DType::kF32;
      options.seq = 16;
      World world(GetParam());
      const LoadedModel loaded = build_model(options);
      const Dataset data =
          Dataset::open("random", options.seq, loaded.config.vocab_size, 0);
      const auto optim = make_optimizer("adamw", loaded.model->parameters(),
                                        options.optimizer_options);
      DataParallel model(*loaded.model, world.devices);
      train(options, *optim, false, [&](std::int64_t step) {
        return train_step(options, model, *optim, data, step);
      });
      const auto bills = memory_bills(options, loaded.config, *loaded.model);
      for (std::size_t i = 0; i < world.devices.size(); ++i) {
        const MemoryStats memory = world.devices[i].memory();
        for (int k = 0; k < kNumMemoryKinds; ++k) {
          const double predicted = bills[i].bytes[static_cast<std::size_t>(k)];
          if (predicted < 0) continue;
          EXPECT_EQ(
              static_cast<double>(memory.peak(static_cast<MemoryKind>(k))),
              predicted)
              << name << ", dropout " << dropout << ", batch " << batch
              << ", device " << i << ", "
              << memory_kind_name(static_cast<MemoryKind>(k));
        }
      }
    }
  }
}

TEST(DataParallelBill, OnlyTheMainDeviceHoldsStateBetweenSteps) {
  Options options = tiny_options(3, 6);
  options.model = "mlp";
  World world(3);
  const LoadedModel loaded = build_model(options);
  const Dataset data = Dataset::open("random", options.seq, 256, 0);
  const auto optim = make_optimizer("adamw", loaded.model->parameters(),
                                    options.optimizer_options);
  DataParallel model(*loaded.model, world.devices);
  train_step(options, model, *optim, data, 0);
  EXPECT_EQ(world.devices[1].memory().current_total, 0);
  EXPECT_EQ(world.devices[2].memory().current_total, 0);
  EXPECT_GT(world.devices[0].memory().current(MemoryKind::kOptimizerState), 0);
}

TEST(DataParallelBill, WarnsOfUnequalMemory) {
  const Device large = Device::cpu(0, 1000), close = Device::cpu(1, 750),
               small = Device::cpu(2, 749), endless = Device::cpu(3);
  EXPECT_EQ(imbalance_warning({large, close}), "");
  EXPECT_EQ(imbalance_warning({endless, Device::cpu(4)}), "");
  EXPECT_TRUE(contains(imbalance_warning({large, small}),
                       "cpu:2 has 749 bytes of memory, less than 75 % of "
                       "cpu:0"));
  EXPECT_TRUE(contains(imbalance_warning({large, endless}), "cpu:0"));
}

TEST(DataParallelBill, TracesHaveATrackPerDevice) {
  World world(2);
  Probe module;
  DataParallel model(module, world.devices);
  const TempFolder folder;
  {
    DeviceTraces traces(world.devices);
    traces.watch(world.context, *model.ledger());
    sum(square(model(random_tensor({4, 6}, 3)))).backward();
    traces.write(folder / "trace.json");
  }
  EXPECT_FALSE(world.context.observed());
  model(random_tensor({4, 6}, 3));
}

TEST(DataParallelErrors, DevicesAreNamedOnce) {
  World world(2);
  Probe module;
  EXPECT_TRUE(contains(error_of([&] { DataParallel(module, {}); }),
                       "device_ids is empty"));
  EXPECT_TRUE(
      contains(error_of([&] {
                 DataParallel(module, {world.devices[0], world.devices[0]});
               }),
               "are the same device"));
}

// --- Traps: the wrong way must differ ---------------------------------------

TEST(DataParallelTrap, MeanOverDevicesWeightsAnUnevenChunkWrongly) {
  World world(3);
  Probe module;
  const Tensor x = random_tensor({7, 6}, 3), target = random_tensor({7, 3}, 4);
  const double expected = mse_loss(module(x), target).item();
  DataParallel model(module, world.devices);
  const Value inputs(Value::List{Value(x), Value(target)});
  const Tensor losses =
      model(inputs, [](Module& m, const Value& in) {
        return Value(mse_loss(m(in[0].tensor()), in[1].tensor()));
      }).tensor();
  ASSERT_EQ(losses.shape(), Shape{3});
  EXPECT_GT(std::abs(mean(losses).item() - expected), 1e-3);
  // Each loss counts as often as its chunk has rows: 3, 3, 1.
  const Tensor weights = Tensor::from_values<double>({3, 3, 1}, {3});
  EXPECT_NEAR(sum(mul(losses, weights)).item() / 7, expected, 1e-12);
}

TEST(DataParallelTrap, AveragedGradientsAreTooSmall) {
  World world(4);
  Probe module;
  const Tensor x = random_tensor({8, 6}, 3), target = random_tensor({8, 3}, 4);
  mse_loss(module(x), target).backward();
  const Tensors expected = grads_of(module);
  module.clear_grad();
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
      gather(parallel_apply(kept, chunks, world.devices), world.devices[0])
          .tensor();
  EXPECT_GT(max_relative({stale}, {expected}), 1e-3);
  DataParallel model(module, world.devices);
  EXPECT_LT(max_relative({model(x)}, {expected}), kF64);
}

TEST(DataParallelTrap, DropoutAtLocalRowsDiffersFromOneDevice) {
  World world(2);
  const Tensor x = Tensor::full({8, 16}, 1, {DType::kF64, Device()});
  const Tensor expected = dropout(x, 0.5);
  // Each half draws as if it began at row 0.
  world.context.random.next_op = 0;
  const Tensor first = dropout(x.rows_view(0, 4), 0.5);
  world.context.random.next_op = 0;
  const Tensor second = dropout(x.rows_view(4, 8), 0.5);
  EXPECT_FALSE(bitwise_equal(concat({first, second}, 0), expected));
  world.context.random.next_op = 0;
  Dropout module(0.5);
  EXPECT_TRUE(bitwise_equal(DataParallel(module, world.devices)(x), expected));
}

}  // namespace
}  // namespace shardbook::data_parallel
