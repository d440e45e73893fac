// Thread ranks whose tensors lie on GPUs.

#include <gtest/gtest.h>

#include "comm/launch.h"
#include "core/context.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook {
namespace {

// Rank 0's values after an all-reduce of fractions.
std::vector<double> sums(const std::string& device, int num_gpus, DType dtype,
                         int world_size = 5) {
  emulator::set_device_count(num_gpus);
  emulator::set_seed(0);
  LaunchOptions options;
  options.device = device;
  const auto results = on_ranks(
      world_size,
      [&](ProcessGroup& world) {
        std::vector<double> values;
        for (int i = 0; i < 3000; ++i) {
          values.push_back(1.0 / (1 + (i * 7 + world.rank() * 131) % 997));
        }
        const Tensor x = Tensor::empty({3000}, {dtype, Device()});
        x.copy_from(Tensor::from_values<double>(values, {3000}));
        world.all_reduce(x).wait();
        return x.to_vector<double>();
      },
      options);
  emulator::set_device_count(8);
  return results[0];
}

TEST(ThreadsOnGpus, SumsHaveTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const std::vector<double> expected = sums("cpu", 8, dtype);
    EXPECT_EQ(sums("cuda", 1, dtype), expected) << dtype_name(dtype);
    EXPECT_EQ(sums("cuda", 8, dtype), expected) << dtype_name(dtype);
  }
}

// Above 16 inputs the kernel continues from sums in scratch memory, which must
// lie on the GPU and outlive the call.
TEST(ThreadsOnGpus, SumsOfManyRanksGoThroughScratch) {
  EXPECT_EQ(sums("cuda", 1, DType::kBF16, /*world_size=*/18),
            sums("cpu", 8, DType::kBF16, /*world_size=*/18));
}

TEST(ThreadsOnGpus, RanksShareTheMemoryOfAGpu) {
  emulator::set_device_count(2);
  LaunchOptions options;
  options.device = "cuda";
  const auto devices = on_ranks(
      3, [](ProcessGroup&) { return RankContext::current().device; }, options);
  emulator::set_device_count(8);
  EXPECT_EQ(devices[0].name(), "cuda:0");
  EXPECT_EQ(devices[1].name(), "cuda:1");
  EXPECT_EQ(devices[2].name(), "cuda:0");
  EXPECT_EQ(devices[0].capacity_bytes(), devices[2].capacity_bytes());
  EXPECT_GT(devices[0].capacity_bytes(), 0);
  EXPECT_EQ(devices[1].capacity_bytes(), 0) << "alone on its GPU";
}

TEST(ThreadsOnGpus, TensorsOfHostAndGpuDoNotMeet) {
  LaunchOptions options;
  options.device = "cuda";
  expect_error(
      [&] {
        run_ranks(
            2,
            [](ProcessGroup& world) {
              const Device device =
                  world.rank() == 0 ? Device() : Device::cpu(world.rank());
              world.all_reduce(Tensor::zeros({4}, {DType::kF32, device}))
                  .wait();
            },
            options);
      },
      {"rank 0 passes a tensor on a GPU, rank 1 one of the host"});
}

}  // namespace
}  // namespace shardbook
