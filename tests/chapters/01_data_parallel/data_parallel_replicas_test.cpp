// Replicas: shared parts, lifetimes, and the threads they run on.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "core/autograd.h"
#include "tests/chapters/01_data_parallel/data_parallel_support.h"
#include "tests/support/errors.h"

namespace shardbook::data_parallel {
namespace {

using namespace test;

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

TEST(DataParallelReplicate, NamesWhatIsOnAnotherDevice) {
  World world(2);
  Probe probe;
  probe.fc2.bias = to_device(probe.fc2.bias.detach(), world.devices[1]);
  expect_text(error_of([&] { replicate(probe, world.devices); }),
              {"'fc2.bias' is on cpu:1"});
  BatchNorm norm(3, {1, DType::kF64, Device()});
  norm.running_mean = to_device(norm.running_mean, world.devices[1]);
  expect_text(error_of([&] { replicate(norm, world.devices); }),
              {"'running_mean' is on cpu:1"});
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
  // The same when no backward follows.
  { DataParallel(module, world.devices)(random_tensor({4, 6}, 1)); }
  EXPECT_EQ(world.devices[1].memory().current_total, 0);
}

/// A module whose backward refers to the module that ran the forward.
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
  /// Backwards that found their module destroyed; all copies share it.
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
}

// --- Parallel apply ---------------------------------------------------------

TEST(DataParallelApply, RunsReplicasOnAThreadEach) {
  World world(3);
  Probe module;
  DataParallel model(module, world.devices);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::vector<int> devices;
  model(random_tensor({6, 6}, 1), [&](Module& m, const Tensor& x) {
    std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
    devices.push_back(RankContext::current().device.index());
    return call_module(m, x);
  });
  EXPECT_EQ(threads.size(), 3u);
  // The caller runs the first one itself: otherwise it would only wait.
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 1u);
  std::sort(devices.begin(), devices.end());
  EXPECT_EQ(devices, (std::vector<int>{0, 1, 2}));
}

TEST(DataParallelApply, RethrowsTheFirstErrorAfterAllHaveEnded) {
  World world(4);
  Probe module;
  DataParallel model(module, world.devices);
  std::atomic<int> ended{0};
  const std::string error = error_of([&] {
    model(random_tensor({8, 6}, 1), [&](Module&, const Tensor& x) {
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
  expect_error(
      [&] {
        model(random_tensor({40, 6}, 1));
      },
      {"out of memory on cpu:1"});
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

}  // namespace
}  // namespace shardbook::data_parallel
