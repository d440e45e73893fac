// The allocator: counts, refusals and reuse.

#include "core/device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/internal/device_runtime.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

constexpr MemoryKind kAct = MemoryKind::kActivation;
constexpr MemoryKind kGrad = MemoryKind::kGradient;

TEST(Device, HandlesNameOneDevice) {
  const Device a = Device::cpu(1);
  const Device same = a;
  const Device other = Device::cpu(1);
  EXPECT_EQ(a, same);
  EXPECT_NE(a, other);
  EXPECT_EQ(a.name(), "cpu:1");
  EXPECT_EQ(Device::meta(3).name(), "meta:3");
  EXPECT_EQ(a.index(), 1);
  EXPECT_EQ(Device().name(), "no device");
  expect_error([] { Device().type(); }, {"no device"});
}

TEST(Device, WithoutALibraryOrAGpuTheReasonIsTheError) {
  const std::string why = internal::why_no_cuda();
  if (why.empty()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(why.substr(0, 6), "cuda: ");
  expect_error([] { Device::cuda(); }, {why});
}

TEST(Allocator, CountsExactlyWhatWasAsked) {
  const Device device = Device::cpu();
  {
    Storage a(device, 100, kAct);
    Storage b(device, 1, kGrad);
    const MemoryStats now = device.memory();
    EXPECT_EQ(now.current(kAct), 100);
    EXPECT_EQ(now.current(kGrad), 1);
    EXPECT_EQ(now.current_total, 101);
    EXPECT_EQ(now.num_allocations, 2);
  }
  EXPECT_EQ(device.memory().current_total, 0);
  EXPECT_EQ(device.memory().peak_total, 101);
}

TEST(Allocator, PeaksByKindByHand) {
  // step           act  grad  total
  // a = 100 act    100    0    100
  // b = 300 act    400    0    400   peak of act
  // free b         100    0    100
  // c = 350 grad   100  350    450   peak of grad, peak of all
  // free a           0  350    350
  const Device device = Device::cpu();
  auto a = std::make_unique<Storage>(device, 100, kAct);
  auto b = std::make_unique<Storage>(device, 300, kAct);
  b.reset();
  auto c = std::make_unique<Storage>(device, 350, kGrad);
  a.reset();
  MemoryStats stats = device.memory();
  EXPECT_EQ(stats.peak(kAct), 400);
  EXPECT_EQ(stats.peak(kGrad), 350);
  EXPECT_EQ(stats.peak_total, 450);
  EXPECT_EQ(stats.at_peak_by_kind[static_cast<std::size_t>(kAct)], 100);
  EXPECT_EQ(stats.at_peak_by_kind[static_cast<std::size_t>(kGrad)], 350);
  EXPECT_EQ(stats.current_total, 350);

  Device handle = device;
  handle.reset_peak_memory();
  stats = device.memory();
  EXPECT_EQ(stats.peak(kAct), 0);
  EXPECT_EQ(stats.peak(kGrad), 350);
  EXPECT_EQ(stats.peak_total, 350);
}

TEST(Allocator, ThePeakOfTensorsLeavesWorkspaceOut) {
  const Device device = Device::cpu();
  const Storage a(device, 100, kAct);
  auto b = std::make_unique<Storage>(device, 1000, MemoryKind::kWorkspace);
  const Storage c(device, 30, kGrad);
  b.reset();
  EXPECT_EQ(device.memory().peak_total, 1130);
  EXPECT_EQ(device.memory().peak_of_tensors, 130);
  Device(device).reset_peak_memory();
  EXPECT_EQ(device.memory().peak_of_tensors, 130);
}

TEST(Allocator, ChangingTheKindMakesNoPeakOfTheTotal) {
  const Device device = Device::cpu();
  Storage a(device, 100, kAct);
  a.set_kind(kGrad);
  const MemoryStats stats = device.memory();
  EXPECT_EQ(stats.current(kAct), 0);
  EXPECT_EQ(stats.current(kGrad), 100);
  EXPECT_EQ(stats.peak_total, 100);
}

TEST(Allocator, MemoryIsAlignedAndWritable) {
  const Device device = Device::cpu();
  for (std::int64_t bytes : {1, 63, 64, 65, 511, 513, 1 << 20, 3 << 20}) {
    Storage storage(device, bytes, kAct);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(storage.data()) % 64, 0u);
    std::memset(storage.data(), 0x5a, static_cast<std::size_t>(bytes));
  }
  Storage nothing(device, 0, kAct);
  EXPECT_EQ(nothing.data(), nullptr);
}

TEST(Allocator, OutOfMemoryShowsTheLedger) {
  const Device device = Device::cpu(4, 1000);
  Storage parameter(device, 600, MemoryKind::kParameter);
  Storage full(device, 400, kAct);  // exactly full is not too much
  EXPECT_EQ(error_of([&] { Storage more(device, 1, kGrad); }),
            "out of memory on cpu:4: asked for 1 bytes of kind gradient; "
            "1000 bytes in use on cpu:4 (parameter 600, gradient 0, "
            "optimizer_state 0, activation 400, communication 0, input 0, "
            "workspace 0), capacity 1000 bytes");
  // A refusal changes nothing.
  EXPECT_EQ(device.memory().current_total, 1000);
  EXPECT_EQ(device.memory().num_allocations, 2);
}

TEST(Allocator, MetaDevicesHaveACapacityToo) {
  const Device device = Device::meta(0, 1 << 20);
  const TensorOptions options{DType::kF32, device};
  const Tensor fits = Tensor::zeros({1 << 18}, options);
  expect_error([&] { Tensor::zeros({1}, options); },
               {"out of memory on meta:0", "asked for 4 bytes"});
}

TEST(Allocator, AFailedRestoreLeavesTheStorageEmpty) {
  const Device device = Device::cpu(0, 100);
  Storage a(device, 80, kAct);
  a.resize(0);
  auto b = std::make_unique<Storage>(device, 50, kAct);
  expect_error([&] { a.resize(80); }, {"out of memory"});
  EXPECT_EQ(a.bytes(), 0);
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(device.memory().current_total, 50);
  b.reset();
  a.resize(80);
  EXPECT_EQ(device.memory().current_total, 80);
}

TEST(Allocator, FreedBlocksAreUsedAgain) {
  Device device = Device::cpu();
  void* first = nullptr;
  {
    Storage a(device, 1000, kAct);
    first = a.data();
  }
  EXPECT_EQ(device.memory().cached, 1024);
  {
    // Another size of the same block.
    Storage b(device, 700, kGrad);
    EXPECT_EQ(b.data(), first);
    EXPECT_EQ(device.memory().cached, 0);
    EXPECT_EQ(device.memory().current_total, 700);
  }
  EXPECT_EQ(device.memory().cached, 1024);
  device.release_cached_memory();
  EXPECT_EQ(device.memory().cached, 0);
}

// An expert gets a different number of tokens in each step.
TEST(Allocator, BlocksOfNearlyTheSameSizeAreUsedAgain) {
  constexpr std::int64_t kMiB = 1 << 20;
  const Device device = Device::cpu();
  void* first = nullptr;
  {
    Storage a(device, 8 * kMiB + 1, kAct);
    first = a.data();
  }
  EXPECT_EQ(device.memory().cached, 9 * kMiB);
  Storage b(device, 9 * kMiB, kAct);
  EXPECT_EQ(b.data(), first);
  EXPECT_EQ(device.memory().current_total, 9 * kMiB);
}

TEST(Allocator, CountsFromManyThreads) {
  const Device device = Device::cpu();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&device, t] {
      std::vector<std::unique_ptr<Storage>> held;
      for (int i = 0; i < 500; ++i) {
        const auto kind = static_cast<MemoryKind>((i + t) % kNumMemoryKinds);
        held.push_back(std::make_unique<Storage>(device, 1 + i % 97, kind));
        held.back()->set_kind(kAct);
        if (i % 3 == 0) held.erase(held.begin());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const MemoryStats stats = device.memory();
  EXPECT_EQ(stats.current_total, 0);
  EXPECT_EQ(stats.num_allocations, 2000);
  for (std::int64_t bytes : stats.current_by_kind) EXPECT_EQ(bytes, 0);
}

TEST(Allocator, ATensorKeepsItsDeviceAlive) {
  Tensor x;
  {
    const Device device = Device::cpu(7);
    x = Tensor::full({3}, 4, {DType::kF32, device});
  }
  EXPECT_EQ(x.device().name(), "cpu:7");
  EXPECT_EQ(values(x), (std::vector<double>{4, 4, 4}));
}

}  // namespace
}  // namespace shardbook
