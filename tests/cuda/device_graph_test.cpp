// Graphs of core: launches repeat the work on new inputs, their memory stays
// theirs, and what a graph cannot repeat is refused by name. Runs on the
// emulated GPU and on a real one.

#include "core/device_graph.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <utility>

#include "core/internal/cuda_device.h"
#include "core/stream.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

constexpr std::int64_t kSize = 24;  // blocks of 2304 bytes, rounded to 2560

Tensor square_noise(std::uint64_t seed) {
  return noise({kSize, kSize}, seed, -1, 1, {DType::kF32, Device()});
}

double largest(const Tensor& y) {
  return max_abs_difference(y, Tensor::zeros(y.shape(), y.options()));
}

/// Each test has a device of its own: nobody else has blocks there.
class DeviceGraphs : public testing::Test {
 protected:
  Device gpu = Device::cuda();
  RankContext context{gpu};
  RankContext::Scope scope{context};
  Tensor x = square_noise(1), w = square_noise(2);

  Tensor work() const { return gelu(matmul(gelu(x), w)); }
  /// As many blocks of this size as anybody could get, by address.
  static std::set<const void*> addresses_of_new_tensors() {
    Tensors held;
    std::set<const void*> result;
    for (int i = 0; i < 12; ++i) {
      held.push_back(Tensor::zeros({kSize, kSize}));
      result.insert(held.back().raw());
    }
    return result;
  }
};

TEST_F(DeviceGraphs, LaunchesRepeatTheWorkOnNewInputs) {
  work();
  Tensor y;
  const DeviceGraph graph([&] { y = work(); });
  for (std::uint64_t seed = 3; seed < 7; ++seed) {
    x.copy_from(square_noise(seed));
    const Tensor expected = work();
    graph.launch();
    EXPECT_TRUE(bitwise_equal(y, expected)) << seed;
  }
}

TEST_F(DeviceGraphs, NothingRunsBeforeTheLaunch) {
  const Tensor y = Tensor::full({3}, 1);
  const DeviceGraph graph([&] { y.fill(2); });
  EXPECT_EQ(values(y), std::vector<double>(3, 1));
  graph.launch();
  EXPECT_EQ(values(y), std::vector<double>(3, 2));
}

TEST_F(DeviceGraphs, GradientsAreAddedAtEachLaunch) {
  w.set_requires_grad();
  sum(work()).backward();  // makes the gradient
  const Tensor expected = w.grad().clone();
  w.grad().fill(0);
  const DeviceGraph graph([&] { sum(work()).backward(); });
  EXPECT_EQ(largest(w.grad()), 0);
  graph.launch();
  EXPECT_TRUE(bitwise_equal(w.grad(), expected));
  graph.launch();
  EXPECT_TRUE(bitwise_equal(w.grad(), add(expected, expected)));
}

// --- Memory ------------------------------------------------------------------

TEST_F(DeviceGraphs, KeepTheBlocksThatTheyFreed) {
  work();
  const MemoryStats before = gpu.memory();
  Tensor y;
  std::set<const void*> used;
  {
    DeviceGraph graph([&] {
      const Tensor a = gelu(x);
      const Tensor b = matmul(a, w);
      y = gelu(b);
      used = {a.raw(), b.raw()};
    });
    // The ledger counts y and nothing else.
    const std::int64_t bytes = y.bytes();
    EXPECT_EQ(gpu.memory().current_total, before.current_total + bytes);
    for (const void* address : addresses_of_new_tensors()) {
      EXPECT_EQ(used.count(address), 0u);
    }
    gpu.release_cached_memory();
    EXPECT_GE(gpu.memory().cached, 2 * bytes);
    graph.launch();
    EXPECT_TRUE(bitwise_equal(y, work()));
  }
  // They are ordinary blocks again
  const std::set<const void*> later = addresses_of_new_tensors();
  for (const void* address : used) EXPECT_EQ(later.count(address), 1u);
  gpu.release_cached_memory();
  EXPECT_EQ(gpu.memory().cached, 0);
}

TEST_F(DeviceGraphs, ReuseABlockWithinTheRecording) {
  work();
  const void* first = nullptr;
  const void* second = nullptr;
  const DeviceGraph graph([&] {
    first = gelu(x).raw();
    second = gelu(w).raw();
  });
  EXPECT_EQ(first, second);
}

TEST_F(DeviceGraphs, ShareMemoryWhereTheyAreTold) {
  work();
  const void* first = nullptr;
  const void* second = nullptr;
  Tensor y, z;
  const DeviceGraph graph([&] { first = gelu(x).raw(), y = relu(x); });
  const DeviceGraph other([&] { second = gelu(x).raw(); });
  EXPECT_NE(first, second);
  const DeviceGraph turns([&] { second = gelu(w).raw(), z = relu(w); }, &graph);
  EXPECT_EQ(first, second);
  // What is held is not shared
  EXPECT_NE(y.raw(), z.raw());
  graph.launch();
  turns.launch();
  EXPECT_TRUE(bitwise_equal(y, relu(x)));
  EXPECT_TRUE(bitwise_equal(z, relu(w)));
}

// A launch writes to y's address, whoever has it.
TEST_F(DeviceGraphs, KeepTheBlocksOfTensorsThatTheyUse) {
  Tensor y = square_noise(5);
  const void* address = y.raw();
  const DeviceGraph graph([&] { y.fill(3); });
  y = Tensor();
  EXPECT_EQ(addresses_of_new_tensors().count(address), 0u);
  const Tensor other = Tensor::zeros({kSize, kSize});
  graph.launch();
  EXPECT_EQ(largest(other), 0);
}

// A graph could not wait for that stream.
TEST_F(DeviceGraphs, TakeNoBlockThatAnotherStreamHasUsed) {
  work();
  gpu.release_cached_memory();
  {
    const StreamScope copies(kCopyStream);
    addresses_of_new_tensors();
  }
  Tensor y;
  const DeviceGraph graph([&] { y = work(); });
  graph.launch();
  EXPECT_TRUE(bitwise_equal(y, work()));
}

TEST_F(DeviceGraphs, CountTheirMemoryInTheCapacity) {
  const std::int64_t capacity = 40 << 10;
  RankContext small(Device::cuda(0, capacity));
  const RankContext::Scope inside(small);
  const Tensor a = Tensor::zeros({1024});
  gelu(gelu(a));  // starts what the first kernels start
  const DeviceGraph graph([&] { gelu(gelu(a)); });
  // a and the graph's two blocks leave 28 KiB
  EXPECT_EQ(Tensor::zeros({7 * 1024}).numel(), 7 * 1024);
  expect_error([] { Tensor::zeros({8 * 1024}); },
               {"out of memory on cuda:0", "graphs keep 8192 bytes"});
}

// --- What cannot be recorded -------------------------------------------------

TEST_F(DeviceGraphs, NameTheOperationThatCannotBeRecorded) {
  const Tensor loss = sum(work());
  max_abs_difference(x, w);
  Event event;
  event.record();
  AttentionOptions attends;
  attends.heads = 1, attends.dropout = 0.5;
  const Tensor q = Tensor::zeros({1, kSize, kSize});
  const std::string refused = "a graph cannot record this";
  const std::vector<std::pair<std::function<void()>, std::string>> all = {
      {[&] { dropout(x, 0.5); }, "dropout: " + refused},
      {[&] { attention(q, q, q, attends); }, "attention: " + refused},
      {[&] { gelu(x), loss.item(); }, "item: " + refused},
      {[&] { gelu(x).to_vector<float>(); },
       "after gelu: " + refused + ": the host reads values"},
      {[&] { max_abs_difference(x, w); }, "the host waits for a result"},
      {[&] { Tensor::arange(3); }, refused + ": values are written"},
      {[&] {
         x.copy_from(Tensor::zeros(x.shape(), {x.dtype(), context.host()}));
       },
       "transfer: " + refused},
      {[&] { event.synchronize(); }, "the host waits for an event"},
      {[&] { event.query(); }, "the host asks for an event"},
      {[&] {
         const StreamScope copies(kCopyStream);
         gelu(x);
       },
       "work for stream 3"},
      {[&] { DeviceGraph inner([&] { gelu(x); }); }, "another graph"},
      {[&] { internal::cuda_device(gpu).synchronize(); },
       "the host waits for the device"},
  };
  for (const auto& [bad, words] : all) {
    expect_error([&bad = bad] { DeviceGraph graph(bad); },
                 {"device graph: ", words});
    // The stream records no more, and can record again
    Tensor y;
    const DeviceGraph good([&] { y = work(); });
    good.launch();
    EXPECT_TRUE(bitwise_equal(y, work())) << words;
  }
}

TEST_F(DeviceGraphs, NeedAKernelToHaveRunBefore) {
  RankContext fresh(gpu);
  const RankContext::Scope inside(fresh);
  const Tensor table = Tensor::zeros({4, 4});
  const Tensor indices = Tensor::zeros({2}, {DType::kI64, Device()});
  expect_error([&] { DeviceGraph graph([&] { embedding(table, indices); }); },
               {"embedding", "run the work once before"});
  embedding(table, indices);
  const DeviceGraph graph([&] { embedding(table, indices); });
  graph.launch();
}

TEST_F(DeviceGraphs, AreForGpusWithoutObservers) {
  const auto nobody = std::make_shared<Observer>();
  context.add_observer(nobody);
  expect_error([&] { DeviceGraph graph([&] { work(); }); }, {"observed"});
  context.remove_observer(nobody);
  {
    RankContext cpu(Device::cpu(0));
    const RankContext::Scope inside(cpu);
    expect_error([] { DeviceGraph graph([] {}); }, {"cpu:0", "no GPU"});
  }
  work();
  const DeviceGraph graph([&] { work(); });
  const StreamScope copies(kCopyStream);
  expect_error([&] { graph.launch(); }, {"stream 0", "stream 3"});
}

}  // namespace
}  // namespace shardbook
