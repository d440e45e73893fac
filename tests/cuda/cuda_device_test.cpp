// CUDA devices on the emulated GPU, which works as late as possible: reuse of
// memory, streams, events, copies. A missing wait shows in values.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/internal/cuda_device.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "tests/core/support.h"
#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/parity.h"

namespace shardbook {
namespace {

constexpr MemoryKind kKind = MemoryKind::kActivation;

class CudaDeviceTest : public testing::Test {
 protected:
  CudaDeviceTest() {
    parity::choose_library();
    emulator::set_seed(0);
  }
};

/// The same with a rank on a GPU of its own.
class CudaRankTest : public CudaDeviceTest {
 protected:
  RankContext context{Device::cuda()};
  // Calls before this test
  const int num_records = emulator::num_calls("cudaEventRecord"),
            num_holds = emulator::num_calls("cudaStreamWaitEvent");

 private:
  RankContext::Scope scope_{context};
};

using CudaAllocator = CudaRankTest;
using CudaStreams = CudaRankTest;
using CudaCopies = CudaRankTest;

Tensor full(double value, const Device& device, std::int64_t n = 4) {
  return Tensor::full({n}, value, {DType::kF32, device});
}

std::vector<double> four(double value) { return std::vector<double>(4, value); }

TEST_F(CudaDeviceTest, HasANameAndATypeOfItsOwn) {
  const Device device = Device::cuda(1, 1000);
  EXPECT_EQ(device.name(), "cuda:1");
  EXPECT_TRUE(device.is_cuda());
  EXPECT_FALSE(device.is_meta());
  EXPECT_EQ(device.capacity_bytes(), 1000);
  expect_error([] { Device::cuda(4); }, {"cuda:4", "4 GPUs"});
}

// --- Memory ------------------------------------------------------------------

TEST_F(CudaAllocator, OneStreamReusesABlockWithoutAnyEvent) {
  Tensor x = full(1, context.device);
  const void* address = x.raw();
  x = Tensor();
  x = full(2, context.device);
  EXPECT_EQ(x.raw(), address);
  EXPECT_EQ(emulator::num_calls("cudaEventRecord"), num_records);
  EXPECT_EQ(emulator::num_calls("cudaStreamWaitEvent"), num_holds);
  EXPECT_EQ(values(x), four(2));
}

TEST_F(CudaAllocator, AnotherStreamRunsAfterTheEarlierUsersOfABlock) {
  const Tensor kept = full(0, context.device);
  Tensor x = full(1, context.device);
  kept.copy_from(x);
  x = Tensor();
  const StreamScope copies(kCopyStream);
  const Tensor y = full(2, context.device);  // at x's address
  EXPECT_EQ(emulator::num_calls("cudaStreamWaitEvent"), num_holds + 1);
  EXPECT_EQ(values(y), four(2));
  const StreamScope compute(kComputeStream);
  EXPECT_EQ(values(kept), four(1));
  EXPECT_EQ(values(y), four(2));
}

// A block's users are the streams that asked for its address, not the stream
// that freed it.
TEST_F(CudaAllocator, AStreamThatFreesABlockRunsAfterItsUsers) {
  Tensor x;
  {
    const StreamScope copies(kCopyStream);
    x = full(1, context.device);
  }
  x = Tensor();
  const Tensor y = full(2, context.device);
  EXPECT_EQ(values(y), four(2));
  const StreamScope copies(kCopyStream);
  EXPECT_EQ(values(full(3, context.device)), four(3));  // runs the stream
  EXPECT_EQ(values(y), four(2));
}

TEST_F(CudaAllocator, TheEventsOfABlockThatNobodyUsedStayWithIt) {
  Tensor x = full(1, context.device);
  x = Tensor();
  x = Tensor::empty({4});  // its address is never asked for
  x = Tensor();
  const StreamScope copies(kCopyStream);
  const Tensor y = full(2, context.device);
  EXPECT_EQ(values(y), four(2));
  const StreamScope compute(kComputeStream);
  EXPECT_EQ(values(full(3, context.device, 1000)).back(), 3);
  EXPECT_EQ(values(y), four(2));
}

TEST_F(CudaAllocator, AStreamTakesItsOwnBlocksFirst) {
  Tensor mine = full(1, context.device);
  Tensor first, last;
  {
    const StreamScope copies(kCopyStream);
    first = full(1, context.device);
    last = full(1, context.device);
  }
  const void* const mine_at = mine.raw();
  for (Tensor* tensor : {&first, &mine, &last}) *tensor = Tensor();
  const Tensor next = full(2, context.device);
  EXPECT_EQ(next.raw(), mine_at);
  EXPECT_EQ(emulator::num_calls("cudaStreamWaitEvent"), num_holds);
}

TEST_F(CudaAllocator, CountsLikeTheCpuAndRefusesBeyondItsCapacity) {
  const Device gpu = Device::cuda(0, 1000), cpu = Device::cpu(0, 1000);
  for (const Device& device : {gpu, cpu}) {
    Storage a(device, 600, kKind);
    { Storage b(device, 100, MemoryKind::kGradient); }
    EXPECT_EQ(device.memory().current_total, 600);
    EXPECT_EQ(device.memory().peak_total, 700);
    EXPECT_EQ(device.memory().cached, 512);
    expect_error([&] { Storage(device, 401, kKind); },
                 {"out of memory on " + device.name(), "asked for 401 bytes",
                  "activation 600", "capacity 1000 bytes"});
  }
}

TEST_F(CudaAllocator, ASliceCountsCachedMemoryToo) {
  const Device device = Device::cuda(0, 4096);
  const std::size_t before = emulator::allocated_bytes(0);
  for (const std::int64_t bytes : {1024, 2048, 3072, 4096}) {
    Storage block(device, bytes, kKind);
    EXPECT_LE(emulator::allocated_bytes(0), before + 4096);
  }
}

TEST_F(CudaAllocator, WhenTheGpuIsFullCachedBlocksGoBackOnce) {
  full(0, context.device);  // starts what the first kernel starts
  context.device.release_cached_memory();
  const std::size_t full_at = emulator::allocated_bytes(0) + 4096;
  emulator::set_device_memory(full_at);
  Tensor x = full(1, context.device, 512);  // 2048 bytes
  x = Tensor();                             // its fill has not run yet
  const Tensor y = full(2, context.device, 1024);
  EXPECT_EQ(emulator::allocated_bytes(0), full_at);
  EXPECT_EQ(context.device.memory().cached, 0);
  expect_error([&] { full(3, context.device); },
               {"out of memory", "cuda:0", "activation 4096"});
  emulator::set_device_memory(std::size_t{16} << 30);
  EXPECT_EQ(values(y).back(), 2);
}

TEST_F(CudaDeviceTest, GivesEverythingBackAtTheEnd) {
  std::size_t held[2];  // the first kernels may keep something
  for (std::size_t& bytes : held) {
    {
      RankContext context(Device::cuda());
      const RankContext::Scope scope(context);
      const Tensor x = full(1, context.device);
      const StreamScope copies(kCopyStream);
      const Tensor y = full(1, context.device);
    }
    bytes = emulator::allocated_bytes(0);
  }
  EXPECT_EQ(held[0], held[1]);
}

// --- Streams and events ------------------------------------------------------

TEST_F(CudaStreams, AnEventPassesWhenItsStreamGetsThere) {
  const Tensor x = full(1, context.device);
  Event before, after;
  before.record();
  x.fill(2);
  after.record();
  EXPECT_FALSE(before.query());
  before.synchronize();
  EXPECT_TRUE(before.query());
  EXPECT_FALSE(after.query());
  expect_error([&] { after.elapsed_s(before); }, {"passed"});
  after.synchronize();
  EXPECT_GT(after.elapsed_s(before), 0);
}

TEST_F(CudaStreams, AStreamThatWaitsRunsAfterTheEvent) {
  const Tensor x = full(1, context.device);
  const Tensor y = full(0, context.device);
  Event filled;
  filled.record();
  const StreamScope copies(kCopyStream);
  filled.wait();
  y.copy_from(x);
  EXPECT_EQ(values(y), four(1));
}

// Host work, such as an optimizer step on offloaded state, waits itself.
TEST_F(CudaStreams, AWaitForHostWorkHoldsTheHost) {
  const Tensor x = full(1, context.device);
  Event filled;
  filled.record();
  const ContextValue<Device> on_host(&RankContext::device, context.host());
  EXPECT_FALSE(filled.query());
  filled.wait();
  EXPECT_TRUE(filled.query());
  // Work on GPU tensors is still issued on the GPU's streams.
  x.fill(2);
  Event again;
  again.record();
  EXPECT_FALSE(again.query());
}

TEST_F(CudaStreams, RanksOnOneGpuHaveStreamsOfTheirOwn) {
  const Device a = Device::cuda(), b = Device::cuda();
  EXPECT_NE(internal::cuda_device(a).stream(0),
            internal::cuda_device(b).stream(0));
  EXPECT_NE(internal::cuda_device(a).stream(0),
            internal::cuda_device(a).stream(1));
  EXPECT_EQ(internal::cuda_device(a).stream(1),
            internal::cuda_device(a).stream(1));
  expect_error([&] { internal::cuda_device(a).stream(64); }, {"0 to 63"});
}

// --- Copies ------------------------------------------------------------------

TEST_F(CudaCopies, ToTheGpuAndBackInEveryDType) {
  std::vector<float> from = {1.5f, -2, 0.25f, 3};
  const Tensor x = Tensor::from_values<float>(from, {2, 2});
  EXPECT_TRUE(x.device().is_cuda());
  from.assign(4, 0);  // the call has copied
  EXPECT_EQ(values(x), (std::vector<double>{1.5, -2, 0.25, 3}));
  EXPECT_EQ(x.flat_view(3, {}).item(), 3);
  for (const DType dtype : {DType::kF64, DType::kBF16, DType::kF16}) {
    const Tensor narrow = Tensor::empty({2, 2}, {dtype, context.device});
    narrow.copy_from(x);
    const Tensor on_host = Tensor::empty({2, 2}, {DType::kF32, context.host()});
    on_host.copy_from(narrow);
    EXPECT_EQ(values(on_host), values(x)) << dtype_name(dtype);
    narrow.zero();
    narrow.copy_from(on_host);
    EXPECT_EQ(values(narrow), values(x)) << dtype_name(dtype);
  }
  EXPECT_EQ(values(Tensor::arange(3)), (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(values(Tensor::zeros({2})), (std::vector<double>{0, 0}));
  EXPECT_TRUE(bitwise_equal(x.clone(), x));
  EXPECT_EQ(max_abs_difference(
                x, Tensor::full({2, 2}, 1, {DType::kF32, context.host()})),
            3);
}

// Both ranks' streams meet at the copy: it reads earlier writes, and none of
// the later ones.
TEST_F(CudaCopies, BetweenRanksAreOrderedOnBothSides) {
  RankContext sender(Device::cuda()), receiver(Device::cuda());
  Tensor x;
  {
    const RankContext::Scope scope(sender);
    x = full(1, sender.device);
  }
  const RankContext::Scope scope(receiver);
  const Tensor y = full(0, receiver.device);
  y.copy_from(x);
  {
    const RankContext::Scope sends(sender);
    x.fill(5);
    EXPECT_EQ(values(x), four(5));
  }
  EXPECT_EQ(values(y), four(1));
  const Tensor wide = Tensor::empty({4}, {DType::kF64, receiver.device});
  wide.copy_from(x);
  EXPECT_EQ(values(wide), four(5));
}

TEST_F(CudaCopies, OnTheHostARankComputesWithTheHostsKernels) {
  const TensorOptions on_host{DType::kF32, context.host()};
  const Tensor sum =
      add(Tensor::full({4}, 1, on_host), Tensor::full({4}, 2, on_host));
  EXPECT_EQ(values(sum), four(3));
  EXPECT_EQ(context.device.memory().peak_total, 0);
  EXPECT_NE(&context.kernels(context.device), &context.kernels(sum.device()));
}

}  // namespace
}  // namespace shardbook
