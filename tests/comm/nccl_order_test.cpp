// Calls of backend nccl are ordered with the other work of streams.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/launch.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/stand_in/stand_in.h"

namespace shardbook {
namespace {

void run_on_gpus(int world_size,
                 const std::function<void(ProcessGroup&)>& body) {
  emulator::set_seed(0);
  LaunchOptions options;
  options.backend = "nccl";
  options.timeout = std::chrono::seconds(20);
  ASSERT_NO_THROW(run_ranks(world_size, body, options));
}

TEST(NcclOrder, WaitDoesNotStopTheHost) {
  std::atomic<bool> has_waited{false};
  std::vector<float> result;
  run_on_gpus(2, [&](ProcessGroup& world) {
    // Rank 1 calls only after rank 0 has returned from wait().
    while (world.rank() == 1 && !has_waited) std::this_thread::yield();
    const Tensor x = Tensor::full({3}, world.rank() + 1);
    world.all_reduce(x).wait();
    has_waited = true;
    if (world.rank() == 0) result = x.to_vector<float>();
  });
  EXPECT_EQ(result, (std::vector<float>{3, 3, 3}));
}

TEST(NcclOrder, BuffersLiveUntilTheDeviceHasUsedThem) {
  std::vector<float> result;
  run_on_gpus(2, [&](ProcessGroup& world) {
    const Tensor all = Tensor::zeros({200000});
    {
      const Tensor mine = Tensor::full({100000}, world.rank() + 1);
      Work dropped = world.all_gather(all, mine);
    }
    // Reuses the memory of `mine`, if that is already free.
    const Tensor other = Tensor::full({100000}, 9);
    world.barrier();
    world.all_reduce(Tensor::zeros({1})).wait();
    if (world.rank() == 0) result = all.to_vector<float>();
  });
  ASSERT_EQ(result.size(), 200000u);
  EXPECT_EQ(result.front(), 1);
  EXPECT_EQ(result.back(), 2);
}

TEST(NcclOrder, AMessageOfAnotherTagOvertakesOneThatNobodyAsksFor) {
  std::vector<float> first, second;
  run_on_gpus(2, [&](ProcessGroup& world) {
    constexpr std::int64_t kLarge = 50000;  // not eager
    if (world.rank() == 0) {
      Work a = world.send(Tensor::full({kLarge}, 1), 1, 0);
      Work b = world.send(Tensor::full({kLarge}, 2), 1, 5);
      a.wait();
      b.wait();
      return;
    }
    const Tensor x = Tensor::zeros({kLarge});
    const Tensor y = Tensor::zeros({kLarge});
    world.recv(x, 0, 5).wait();
    second = x.to_vector<float>();
    world.recv(y, 0, 0).wait();
    first = y.to_vector<float>();
  });
  EXPECT_EQ(first, std::vector<float>(50000, 1));
  EXPECT_EQ(second, std::vector<float>(50000, 2));
}

TEST(NcclGroups, PartsOfAGroupAreSplitOff) {
  const stand_in::Counts before = stand_in::counts();
  run_on_gpus(4, [](ProcessGroup& world) {
    world.split(world.rank() % 2, world.rank(), "half");
    // Not every rank has a part: the members make a communicator of their own.
    world.subgroup({0, 1, 2}, "three");
  });
  const stand_in::Counts after = stand_in::counts();
  EXPECT_EQ(after.split - before.split, 4);
  EXPECT_EQ(after.joined - before.joined, 4 + 3);
  EXPECT_EQ(after.live, before.live);
}

}  // namespace
}  // namespace shardbook
