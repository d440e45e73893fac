// Promises of the threads backend alone.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "comm/launch.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"

namespace shardbook {
namespace {

std::vector<float> random_values(int rank, std::int64_t n) {
  std::mt19937 generator(static_cast<unsigned>(rank + 1));
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& value : values) value = uniform(generator);
  return values;
}

// Sums one after the other from rank 0 on, as one device would.
std::vector<float> sum_in_rank_order(int num_ranks, std::int64_t n) {
  std::vector<float> sum = random_values(0, n);
  for (int r = 1; r < num_ranks; ++r) {
    const std::vector<float> next = random_values(r, n);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += next[i];
  }
  return sum;
}

class ThreadSums : public ::testing::TestWithParam<int> {};

TEST_P(ThreadSums, AreInRankOrderBitForBit) {
  const std::int64_t n = 100003;  // several tasks, the last one short
  const std::vector<float> expected = sum_in_rank_order(GetParam(), n);
  run_ranks(GetParam(), [&](ProcessGroup& world) {
    const auto mine = [&] {
      return Tensor::from_values<float>(random_values(world.rank(), n), {n});
    };
    const Tensor reference = Tensor::from_values<float>(expected, {n});
    Tensor x = mine();
    world.all_reduce(x).wait();
    SB_CHECK(bitwise_equal(x, reference), "all_reduce");
    x = mine();
    world.reduce(x, world.size() - 1).wait();
    SB_CHECK(world.rank() != world.size() - 1 || bitwise_equal(x, reference),
             "reduce");
    // A reduce-scatter gives the same bits, piece by piece.
    const std::int64_t piece = n / world.size();
    const Tensor part = Tensor::zeros({piece});
    world.reduce_scatter(part, mine().flat_view(0, {piece * world.size()}))
        .wait();
    SB_CHECK(
        bitwise_equal(part, reference.flat_view(world.rank() * piece, {piece})),
        "reduce_scatter");
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ThreadSums,
                         ::testing::Values(1, 2, 3, 4, 8));

TEST(ThreadGroup, SumsDoNotDependOnWhoComesFirst) {
  const std::int64_t n = 40000;
  const std::vector<float> expected = sum_in_rank_order(3, n);
  for (int late = 0; late < 3; ++late) {
    run_ranks(3, [&](ProcessGroup& world) {
      const Tensor x =
          Tensor::from_values<float>(random_values(world.rank(), n), {n});
      if (world.rank() == late) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      world.all_reduce(x).wait();
      SB_CHECK(bitwise_equal(x, Tensor::from_values<float>(expected, {n})),
               "rank ", late, " comes last");
    });
  }
}

TEST(ThreadGroup, BuffersAreUsedWhereTheyLie) {
  run_ranks(2, [](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({1 << 20});
    const std::int64_t before =
        RankContext::current().device.memory().num_allocations;
    world.all_reduce(x).wait();
    world.broadcast(x, 0).wait();
    SB_CHECK(RankContext::current().device.memory().num_allocations == before,
             "a collective takes no memory of the device");
  });
}

TEST(ThreadGroup, AWaitedWorkLetsItsBuffersGo) {
  run_ranks(2, [](ProcessGroup& world) {
    const Device device = RankContext::current().device;
    const std::int64_t before = device.memory().current_total;
    for (int i = 0; i < 3; ++i) {
      world.all_reduce(Tensor::zeros({1 << 18})).wait();
      SB_CHECK(device.memory().current_total == before,
               "memory is free after wait");
    }
  });
}

// Random calls on random groups, every result checked: a storm for the thread
// sanitizer.
TEST(ThreadGroup, SurvivesAStormOfCalls) {
  constexpr int kRanks = 4;
  run_ranks(kRanks, [](ProcessGroup& world) {
    const auto halves = world.split(world.rank() % 2, world.rank(), "halves");
    const auto twin = world.split(0, world.rank(), "twin");
    std::mt19937 plan(7);  // the same on every rank
    std::vector<Work> works;
    std::vector<std::pair<Tensor, double>> expected;
    const auto check = [&] {
      for (Work& work : works) work.wait();
      works.clear();
      for (const auto& [tensor, value] : expected) {
        for (double got : tensor.to_vector<double>()) {
          SB_CHECK(got == value, "storm: got ", got, ", expected ", value);
        }
      }
      expected.clear();
    };
    for (int i = 0; i < 400; ++i) {
      const std::int64_t n = plan() % 8 == 0 ? 90000 : plan() % 600;
      const Tensor x = Tensor::full({n}, world.rank() + 1);
      switch (plan() % 5) {
        case 0:
          works.push_back(world.all_reduce(x));
          expected.emplace_back(x, 10);
          break;
        case 1:
          works.push_back(halves->all_reduce(x));
          expected.emplace_back(x, world.rank() % 2 == 0 ? 4 : 6);
          break;
        case 2:
          works.push_back(twin->broadcast(x, 2));
          expected.emplace_back(x, 3);
          break;
        case 3: {
          const Tensor y = Tensor::zeros({n});
          works.push_back(world.recv(y, (world.rank() + 3) % kRanks));
          works.push_back(world.send(x, (world.rank() + 1) % kRanks));
          expected.emplace_back(y, (world.rank() + 3) % kRanks + 1);
          break;
        }
        default:
          if (plan() % 4 == 0) check();
          world.barrier();
          break;
      }
    }
    check();
  });
}

TEST(ThreadGroup, WorldsRunSideBySide) {
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&right] {
      run_ranks(2, [&right](ProcessGroup& world) {
        const Tensor x = Tensor::full({50000}, 1);
        for (int step = 0; step < 5; ++step) world.all_reduce(x).wait();
        if (x.to_vector<double>()[49999] == 32) ++right;
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 6);
}

// A run without flushes has a tag for each message: matched messages leave
// nothing behind, whichever side came first.
TEST(ThreadWorld, MessagesThatMetLeaveNothing) {
  using internal::Slot;
  internal::ThreadWorld world(2, /*num_cores=*/0);
  internal::SharedGroup& group = world.root_group();
  float sent = 1, received = 0;
  for (int tag = 0; tag < 100; ++tag) {
    Slot send, recv;
    send.call.op = CommOp::kSend;
    recv.call.op = CommOp::kRecv;
    send.call.root_or_peer = 1;
    recv.call.root_or_peer = 0;
    send.call.tag = recv.call.tag = tag;
    send.call.numel = recv.call.numel = 1;
    send.input = &sent;
    recv.output = &received;
    if (tag % 2 == 0) world.exchange_message(group, 0, send);
    world.exchange_message(group, 1, recv);
    EXPECT_EQ(group.messages.size(), tag % 2 == 0 ? 0u : 1u);
    if (tag % 2 == 1) world.exchange_message(group, 0, send);
    EXPECT_TRUE(group.messages.empty());
  }
  EXPECT_EQ(received, 1);
}

}  // namespace
}  // namespace shardbook
