// Thread ranks whose tensors lie on GPUs.

#include <gtest/gtest.h>

#include "comm/launch.h"
#include "core/context.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

// Rank 0's values after an all-reduce of fractions.
std::vector<double> sums(const std::string& device, int num_gpus, DType dtype,
                         int world_size = 5) {
  emulator::set_device_count(num_gpus);
  emulator::set_seed(0);
  LaunchOptions options;
  options.device = device;
  std::vector<double> result;
  run_ranks(
      world_size,
      [&](ProcessGroup& world) {
        std::vector<double> values;
        for (int i = 0; i < 3000; ++i) {
          values.push_back(1.0 / (1 + (i * 7 + world.rank() * 131) % 997));
        }
        const Tensor x = Tensor::empty({3000}, {dtype, Device()});
        x.copy_from(Tensor::from_values<double>(values, {3000}));
        world.all_reduce(x).wait();
        if (world.rank() == 0) result = x.to_vector<double>();
      },
      options);
  emulator::set_device_count(8);
  return result;
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
  std::vector<std::string> names(3);
  std::vector<std::int64_t> capacities(3);
  run_ranks(
      3,
      [&](ProcessGroup& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        names[rank] = RankContext::current().device.name();
        capacities[rank] = RankContext::current().device.capacity_bytes();
      },
      options);
  emulator::set_device_count(8);
  EXPECT_EQ(names, (std::vector<std::string>{"cuda:0", "cuda:1", "cuda:0"}));
  EXPECT_EQ(capacities[0], capacities[2]);
  EXPECT_GT(capacities[0], 0);
  EXPECT_EQ(capacities[1], 0) << "alone on its GPU";
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
