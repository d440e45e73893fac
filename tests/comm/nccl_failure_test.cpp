// Failures among ranks of backend nccl give errors that name call and rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/launch.h"
#include "core/check.h"
#include "tests/comm/mismatch_cases.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/stand_in/stand_in.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

using test::Outcome;
using ::testing::AllOf;
using ::testing::HasSubstr;

Outcome run(int world_size, const std::function<void(ProcessGroup&)>& body) {
  emulator::set_seed(0);
  LaunchOptions options;
  options.backend = "nccl";
  options.timeout = std::chrono::minutes(1);
  const Outcome outcome = test::outcome_of(world_size, body, options);
  stand_in::reset();
  return outcome;
}

TEST(NcclFailure, ARankThatThrowsStopsAllOthersByName) {
  const auto aborted = stand_in::counts().aborted;
  const Outcome outcome = run(3, [](ProcessGroup& world) {
    world.barrier();  // all ranks are in their bodies
    if (world.rank() == 2) throw Error("the disk is full");
    const Tensor x = Tensor::zeros({1});
    world.all_reduce(x).wait();
    x.item();  // the host waits for the device, which waits for rank 2
    world.barrier();
  });
  EXPECT_EQ(outcome.first_cause, "the disk is full");
  for (const std::size_t rank : {0u, 1u}) {
    EXPECT_THAT(outcome.by_rank[rank],
                HasSubstr("rank 2 failed: the disk is full (while rank " +
                          std::to_string(rank) + " was in "));
  }
  EXPECT_EQ(stand_in::counts().aborted - aborted, 3);
}

TEST(NcclFailure, CallsThatDifferNameBothRanks) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({world.rank() == 0 ? 10 : 12});
    world.all_reduce(x).wait();
    world.barrier();
  });
  EXPECT_THAT(outcome.first_cause,
              AllOf(HasSubstr("calls do not match"),
                    HasSubstr("all_reduce f32[10] over 'world'"),
                    HasSubstr("all_reduce f32[12] over 'world'")));
}

TEST(NcclFailure, CountsOfAllToAllThatDifferNameBothRanks) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({4});
    const Tensor y = Tensor::zeros({world.rank() == 0 ? 5 : 4});
    const std::vector<std::int64_t> expected =
        world.rank() == 0 ? std::vector<std::int64_t>{2, 3}
                          : std::vector<std::int64_t>{2, 2};
    world.all_to_all_v(y, x, {2, 2}, expected).wait();
    world.barrier();
  });
  EXPECT_THAT(outcome.first_cause,
              AllOf(HasSubstr("sends 2 elements of the message 1>0"),
                    HasSubstr("expects 3 elements of the message 1>0")));
}

TEST(NcclFailure, ACallThatNcclRefusesNamesTheCallAndItsSize) {
  stand_in::fail_call("ncclAllReduce");
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    world.all_reduce(Tensor::zeros({10})).wait();
    world.barrier();
  });
  EXPECT_EQ(outcome.first_cause,
            "NCCL: ncclAllReduce of f32[10] failed: system error (planted by a "
            "test)");
}

TEST(NcclFailure, AnErrorOfACallInFlightStopsAllRanks) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    if (world.rank() == 0) stand_in::fail_async(1, "the cable was cut");
    world.barrier();
    for (;;) {
      world.all_reduce(Tensor::zeros({10})).wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  EXPECT_THAT(outcome.first_cause, HasSubstr("the cable was cut"));
  EXPECT_THAT(outcome.by_rank[0], HasSubstr("rank 1 failed: NCCL: "));
}

TEST(NcclFailure, ARankThatNeverComesIsNamedAfterTheTimeout) {
  std::atomic<bool> is_over{false};
  const Outcome outcome = run(2, [&](ProcessGroup& world) {
    if (world.rank() == 1) {
      while (!is_over) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return;
    }
    // Not a timeout of the launch: ranks may take long to join.
    world.set_timeout(std::chrono::milliseconds(300));
    try {
      const Tensor x = Tensor::zeros({10});
      world.all_reduce(x).wait();
      x.to_vector<float>();
      world.barrier();
    } catch (...) {
      is_over = true;
      throw;
    }
  });
  EXPECT_THAT(outcome.by_rank[0],
              HasSubstr("timeout after 300 ms: rank 1 did not join all_reduce "
                        "f32[10] over 'world', in which rank 0 waits"));
}

TEST(NcclLaunch, MoreRanksThanGpusAreRefused) {
  emulator::set_device_count(1);
  const Outcome outcome = run(4, [](ProcessGroup&) {});
  emulator::set_device_count(8);
  EXPECT_EQ(outcome.first_cause,
            "--backend nccl: 4 ranks need 4 GPUs, 1 is visible; use --backend "
            "threads --device cuda to let ranks share it");
}

TEST(NcclLaunch, BackendsRefuseDevicesThatTheyCannotServe) {
  const auto refusal = [](const std::string& backend,
                          const std::string& device) {
    LaunchOptions options;
    options.backend = backend;
    options.device = device;
    return error_of([&] { check_launch(2, options); });
  };
  EXPECT_THAT(refusal("gloo", "cuda"), HasSubstr("--backend gloo: it moves"));
  EXPECT_THAT(refusal("nccl", "cpu"), HasSubstr("--backend nccl: it moves"));
  EXPECT_THAT(refusal("threads", "tpu"), HasSubstr("--device tpu: give"));
  EXPECT_EQ(refusal("threads", "cuda"), "");
}

}  // namespace
}  // namespace shardbook
