// A graph whose nodes lie on several devices: one thread each.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "core/autograd.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

using autograd::custom_function;

/// The identity; its backward first calls `body`.
Tensor probe(const Tensor& x, const std::function<void()>& body) {
  return with_backward(x, [body](const Tensors& grads) {
    body();
    return grads;
  });
}

/// A rank on the first of four devices.
class Devices : public testing::Test {
 protected:
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1),
                                       Device::cpu(2), Device::cpu(3)};
  RankContext context{devices[0], /*rank=*/7};

 private:
  RankContext::Scope scope_{context};
};

TEST_F(Devices, CopiesCarryGradientsBack) {
  const Tensor x = leaf({3, 5}), w = leaf({5, 4});
  sum(square(matmul(x, w))).backward();
  const Tensor dx = x.grad(), dw = w.grad();
  x.clear_grad();
  w.clear_grad();
  const Tensor y = matmul(to_device(x, devices[1]), to_device(w, devices[1]));
  EXPECT_EQ(y.device(), devices[1]);
  to_device(sum(square(y)), devices[0]).backward();
  EXPECT_EQ(x.grad().device(), devices[0]);
  EXPECT_TRUE(bitwise_equal(x.grad(), dx));
  EXPECT_TRUE(bitwise_equal(w.grad(), dw));
}

TEST_F(Devices, EachHasAThreadAndAContextOfItsOwn) {
  context.deterministic = true;
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::set<std::string> names;
  const Tensor x = leaf({4});
  Tensors parts;
  for (int i = 0; i < 3; ++i) {
    Tensor part = square(to_device(x, devices[i]));
    part = probe(part, [&] {
      std::lock_guard<std::mutex> lock(mutex);
      const RankContext& here = RankContext::current();
      threads.insert(std::this_thread::get_id());
      names.insert(here.device.name());
      EXPECT_EQ(here.rank, 7);
      EXPECT_FALSE(here.grad_enabled);
      EXPECT_EQ(here.phase, Phase::kBackward);
      EXPECT_TRUE(here.deterministic);
    });
    parts.push_back(to_device(part, devices[0]));
  }
  sum(concat(parts, 0)).backward();
  EXPECT_EQ(threads.size(), 3u);
  EXPECT_EQ(names, (std::set<std::string>{"cpu:0", "cpu:1", "cpu:2"}));
  expect_close(x.grad(), scale(x.detach(), 6), 1e-15);
}

// One branch waits until the other runs: they must run at the same time.
TEST_F(Devices, RunAtTheSameTime) {
  std::atomic<int> here{0};
  std::atomic<bool> met{true};
  const Tensor x = leaf({4});
  Tensors parts;
  for (int i = 1; i < 3; ++i) {
    const Tensor part = probe(square(to_device(x, devices[i])), [&] {
      ++here;
      for (int t = 0; t < 5000 && here < 2; ++t) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (here < 2) met = false;
    });
    parts.push_back(to_device(part, devices[0]));
  }
  sum(concat(parts, 0)).backward();
  EXPECT_TRUE(met);
}

// 1e16 + 1 - 1e16 depends on the order: arrival must not change it.
TEST_F(Devices, SumsDoNotDependOnWhoArrivesFirst) {
  const std::vector<double> factors = {1e16, 1, -1e16};
  auto gradient = [&](const std::vector<int>& delays_ms, bool into_leaf) {
    const Tensor x = leaf_of({1}, {1});
    const Tensor from = into_leaf ? x : scale(x, 1);
    Tensors parts;
    for (std::size_t i = 0; i < 3; ++i) {
      const Tensor part = custom_function(
          "delayed", {from},
          [&](const Tensors& in) {
            return Tensors{to_device(in[0], devices[i + 1])};
          },
          [&, i](const Tensors& grads) {
            std::this_thread::sleep_for(
                std::chrono::milliseconds(delays_ms[i]));
            return Tensors{scale(to_device(grads[0], devices[0]), factors[i])};
          })[0];
      parts.push_back(to_device(part, devices[0]));
    }
    sum(concat(parts, 0)).backward();
    return x.grad().item();
  };
  for (bool into_leaf : {true, false}) {
    std::set<double> results;
    for (const std::vector<int>& delays : {std::vector<int>{0, 60, 120},
                                           {120, 60, 0},
                                           {60, 0, 120},
                                           {0, 120, 60}}) {
      results.insert(gradient(delays, into_leaf));
    }
    EXPECT_EQ(results.size(), 1u) << (into_leaf ? "leaf" : "result");
  }
}

TEST_F(Devices, ResultsAreTheSameBitsEveryTime) {
  auto run = [&] {
    const Tensor w = leaf({17, 13});
    Tensors losses;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      const Tensor x = noise({5, 17}, 10 + i, -1, 1, {DType::kF64, devices[i]});
      const Tensor mine = to_device(w, devices[i]);
      const Tensor y = tanh(matmul(x, mine));
      losses.push_back(to_device(reshape(sum(mul(y, y)), {1}), devices[0]));
    }
    sum(concat(losses, 0)).backward();
    return w.grad();
  };
  const Tensor first = run();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(bitwise_equal(run(), first));
}

TEST_F(Devices, AnErrorOnAnotherDeviceReachesTheCaller) {
  const Tensor x = leaf({4});
  Tensors parts;
  for (std::size_t i = 0; i < 3; ++i) {
    const Tensor part = probe(to_device(x, devices[i]), [i] {
      SB_CHECK(i != 1, "on purpose on device ", i);
    });
    parts.push_back(to_device(square(part), devices[0]));
  }
  expect_error([&] { sum(concat(parts, 0)).backward(); },
               {"on purpose on device 1"});
  // The failure leaves nothing behind that would disturb the next backward.
  x.clear_grad();
  sum(to_device(square(to_device(x, devices[1])), devices[0])).backward();
  expect_close(x.grad(), scale(x.detach(), 2), 0);
}

TEST_F(Devices, OutOfMemoryOnAnotherReachesTheCaller) {
  const Device small = Device::cpu(1, /*capacity_bytes=*/3 * 8000);
  const Tensor x = leaf({1000});
  Tensor y = exp(to_device(x, small));
  const Tensor loss = sum(to_device(y, devices[0]));
  const Tensor filler = Tensor::zeros({500}, {DType::kF64, small});
  expect_error([&] { loss.backward(); },
               {"out of memory on cpu:1", "capacity 24000"});
}

TEST_F(Devices, HooksRunForLeavesOnEveryDevice) {
  const Tensor a = leaf({4});
  const Tensor b = leaf({4}, 2, -1, 1, {DType::kF64, devices[1]});
  std::mutex mutex;
  std::vector<std::string> on;
  for (const Tensor& w : {a, b}) {
    w.add_accumulate_hook([&](Tensor&) {
      std::lock_guard<std::mutex> lock(mutex);
      on.push_back(RankContext::current().device.name());
    });
  }
  int ends = 0;
  b.add_accumulate_hook(
      [&](Tensor&) { autograd::at_end_of_backward([&] { ++ends; }); });
  sum(add(a, to_device(b, devices[0]))).backward();
  std::sort(on.begin(), on.end());
  EXPECT_EQ(on, (std::vector<std::string>{"cpu:0", "cpu:1"}));
  EXPECT_EQ(ends, 1);
}

TEST_F(Devices, TheCallersOwnMayBeNoneOfThem) {
  const TensorOptions there{DType::kF64, devices[1]};
  const Tensor x = leaf({4}, 1, -1, 1, there);
  sum(to_device(square(x), devices[2])).backward();
  expect_close(x.grad(), scale(x.detach(), 2), 0);
  // A single device other than the caller's.
  x.clear_grad();
  sum(square(x)).backward();
  expect_close(x.grad(), scale(x.detach(), 2), 0);
}

TEST_F(Devices, RecomputationRunsWhereItsNodeLies) {
  context.random.seed = 9;
  auto run = [&](bool again) {
    context.random.next_op = 0;
    const Tensor x = leaf({8, 6});
    auto body = [](const Tensors& in) {
      return Tensors{dropout(square(in[0]), 0.5)};
    };
    const Tensors in = {to_device(x, devices[1])};
    const Tensor y = again ? autograd::recompute(body, in)[0] : body(in)[0];
    sum(to_device(y, devices[0])).backward();
    return x.grad();
  };
  EXPECT_TRUE(bitwise_equal(run(true), run(false)));
}

TEST_F(Devices, OperandsOfTwoAreRefused) {
  const TensorOptions here{DType::kF64, devices[0]};
  const TensorOptions there{DType::kF64, devices[1]};
  const Tensor a = noise({2, 2}, 1, -1, 1, here);
  const Tensor b = noise({2, 2}, 1, -1, 1, there);
  const Tensor row = noise({2}, 1, -1, 1, there);
  expect_error([&] { add(a, b); }, {"add", "cpu:0", "cpu:1"});
  expect_error([&] { matmul(a, b); }, {"matmul", "cpu:0", "cpu:1"});
  expect_error([&] { linear(a, a, row); }, {"linear", "cpu:1"});
  expect_error([&] { layer_norm(a, row, row); }, {"layer_norm", "cpu:1"});
  expect_error([&] { concat({a, b}, 0); }, {"concat", "cpu:1"});
}

}  // namespace
}  // namespace shardbook
