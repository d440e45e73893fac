// Failure among thread ranks is an answer, and comes at once.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/launch.h"
#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

using Body = std::function<void(ProcessGroup&)>;

// What each rank was told, and what run_ranks threw.
struct Outcome {
  std::vector<std::string> by_rank;
  std::string first_cause;
};

constexpr std::chrono::seconds kPatience(20);

Outcome run(int world_size, const Body& body, LaunchOptions options = {}) {
  Outcome outcome;
  outcome.by_rank.resize(static_cast<std::size_t>(world_size));
  if (options.timeout == LaunchOptions().timeout) options.timeout = kPatience;
  try {
    run_ranks(
        world_size,
        [&](ProcessGroup& world) {
          try {
            body(world);
          } catch (const std::exception& error) {
            outcome.by_rank[static_cast<std::size_t>(world.rank())] =
                error.what();
            throw;
          }
        },
        options);
  } catch (const std::exception& error) {
    outcome.first_cause = error.what();
  }
  // Nobody waits until it gives up
  for (const std::string& text : outcome.by_rank) {
    EXPECT_EQ(text.find("timeout after 20000 ms"), std::string::npos) << text;
  }
  return outcome;
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos)
      << "'" << part << "' is missing in '" << text << "'";
}

TEST(ThreadFailure, ARankThatThrowsStopsAllOthersByName) {
  const Outcome outcome = run(4, [](ProcessGroup& world) {
    if (world.rank() == 2) throw Error("the disk is full");
    world.all_reduce(Tensor::zeros({10})).wait();
  });
  EXPECT_EQ(outcome.first_cause, "the disk is full");
  EXPECT_EQ(outcome.by_rank[0],
            "rank 2 failed: the disk is full (while rank 0 was in all_reduce "
            "f32[10] over 'world')");
  EXPECT_EQ(outcome.by_rank[3],
            "rank 2 failed: the disk is full (while rank 3 was in all_reduce "
            "f32[10] over 'world')");
}

TEST(ThreadFailure, TimeoutNamesWhoIsAtTheEndOfTheChainOfWaits) {
  std::atomic<bool> stop{false};
  std::atomic<bool> neighbour_waits{false};
  const Outcome outcome = run(3, [&](ProcessGroup& world) {
    // Only rank 0 is impatient, and its neighbour is not to blame.
    world.set_timeout(world.rank() == 0 ? std::chrono::milliseconds(300)
                                        : std::chrono::minutes(1));
    if (world.rank() == 2) {
      while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    const Tensor x = Tensor::zeros({10});
    // The patience of rank 0 begins when its neighbour is at its call.
    if (world.rank() == 1) neighbour_waits = true;
    while (!neighbour_waits) std::this_thread::yield();
    try {
      world.recv(x, world.rank() + 1).wait();
    } catch (...) {
      stop = true;
      throw;
    }
  });
  EXPECT_EQ(outcome.first_cause,
            "timeout after 300 ms: rank 2 did not join recv f32[10] from rank "
            "2 over 'world', in which rank 1 waits; rank 0 waits for rank 1 in "
            "recv f32[10] from rank 1 over 'world'");
}

TEST(ThreadFailure, TheTypeOfTheFirstCauseIsKept) {
  EXPECT_THROW(run_ranks(2,
                         [](ProcessGroup& world) {
                           if (world.rank() == 1) {
                             throw std::out_of_range("no such layer");
                           }
                           world.barrier();
                         }),
               std::out_of_range);
}

TEST(ThreadFailure, AFailureReachesSubgroupsWithoutTheFailedRank) {
  std::atomic<bool> stop{false};
  const Outcome outcome = run(3, [&](ProcessGroup& world) {
    const auto pair = world.subgroup({0, 1}, "pair");
    if (world.rank() == 2) throw Error("boom");
    // Rank 1 is busy and never calls: only the failure can end rank 0's wait.
    while (world.rank() == 1 && !stop) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (world.rank() == 1) return;
    try {
      pair->barrier();
    } catch (const Error&) {
      stop = true;
      throw;
    }
  });
  EXPECT_EQ(outcome.by_rank[0],
            "rank 2 failed: boom (while rank 0 was in barrier over 'pair')");
}

TEST(ThreadFailure, ARankThatLeavesEarlyIsNamed) {
  const Outcome outcome = run(3, [](ProcessGroup& world) {
    if (world.rank() == 1) return;
    world.broadcast(Tensor::zeros({3}), 0, "weights").wait();
  });
  const std::string start = "rank 1 failed: it ended without joining";
  expect_part(outcome.by_rank[0], start);
  expect_part(outcome.by_rank[2],
              "(while rank 2 was in broadcast f32[3] (root 0) 'weights' over "
              "'world')");
  expect_part(outcome.first_cause, start);
}

TEST(ThreadFailure, AReceiverWithoutSenderIsToldThatTheSenderEnded) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    if (world.rank() == 0) world.recv(Tensor::zeros({3}), 1).wait();
  });
  expect_part(outcome.first_cause, "rank 1 failed: it ended without joining");
  expect_part(outcome.first_cause, "recv f32[3] from rank 1");
}

TEST(ThreadFailure, AbortReachesEverybody) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    if (world.rank() == 1) world.abort("interrupted");
    world.barrier("end of step");
  });
  for (int r : {0, 1}) {
    expect_part(outcome.by_rank[static_cast<std::size_t>(r)],
                "rank 1 failed: interrupted (while rank " + std::to_string(r));
  }
  EXPECT_EQ(outcome.first_cause, "rank 1 failed: interrupted");
}

TEST(ThreadFailure, AllRanksMayHandleAFailureThemselves) {
  std::atomic<int> heard{0};
  run_ranks(3, [&](ProcessGroup& world) {
    if (world.rank() == 1) world.abort("no reason");
    try {
      world.barrier();
    } catch (const Error&) {
      ++heard;
    }
  });
  EXPECT_EQ(heard, 3);
}

// --- Calls that do not match -------------------------------------------------

TEST(ThreadMismatch, AnotherOperationNamesBothRanksAndCalls) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({10});
    if (world.rank() == 0) {
      world.all_reduce(x, ReduceOp::kSum, "gradients").wait();
    } else {
      world.broadcast(x, 0).wait();
    }
  });
  expect_part(outcome.first_cause, "calls over 'world' do not match: ");
  expect_part(outcome.first_cause,
              "rank 0 called all_reduce f32[10] 'gradients'");
  expect_part(outcome.first_cause, "rank 1 called broadcast f32[10] (root 0)");
}

struct Mismatch {
  const char* name;
  Body body;
  const char* first;
  const char* second;
};

class ThreadMismatches : public ::testing::TestWithParam<Mismatch> {};

TEST_P(ThreadMismatches, AreFoundAtTheCall) {
  const Outcome outcome = run(2, GetParam().body);
  expect_part(outcome.first_cause, GetParam().first);
  expect_part(outcome.first_cause, GetParam().second);
  // Both ranks hear of it.
  expect_part(outcome.by_rank[0], GetParam().first);
  expect_part(outcome.by_rank[1], GetParam().first);
}

INSTANTIATE_TEST_SUITE_P(
    Calls, ThreadMismatches,
    ::testing::Values(
        Mismatch{"Numel",
                 [](ProcessGroup& world) {
                   world.all_reduce(Tensor::zeros({10 + world.rank()})).wait();
                 },
                 "rank 0 called all_reduce f32[10]",
                 "rank 1 called all_reduce f32[11]"},
        Mismatch{
            "DType",
            [](ProcessGroup& world) {
              const DType dtype =
                  world.rank() == 0 ? DType::kF32 : DType::kBF16;
              world.all_reduce(Tensor::zeros({4}, {dtype, Device()})).wait();
            },
            "rank 0 called all_reduce f32[4]",
            "rank 1 called all_reduce bf16[4]"},
        Mismatch{"Root",
                 [](ProcessGroup& world) {
                   world.broadcast(Tensor::zeros({4}), world.rank()).wait();
                 },
                 "rank 0 called broadcast f32[4] (root 0)",
                 "rank 1 called broadcast f32[4] (root 1)"},
        Mismatch{"ReduceOp",
                 [](ProcessGroup& world) {
                   const ReduceOp op =
                       world.rank() == 0 ? ReduceOp::kSum : ReduceOp::kMax;
                   world.all_reduce(Tensor::zeros({4}), op).wait();
                 },
                 "rank 0 called all_reduce f32[4]",
                 "rank 1 called all_reduce f32[4] (max)"},
        Mismatch{"Order",
                 [](ProcessGroup& world) {
                   const Tensor a = Tensor::zeros({4});
                   const Tensor b = Tensor::zeros({5});
                   Work first = world.all_reduce(world.rank() == 0 ? a : b);
                   Work second = world.all_reduce(world.rank() == 0 ? b : a);
                   first.wait();
                   second.wait();
                 },
                 "rank 0 called all_reduce f32[4]",
                 "rank 1 called all_reduce f32[5]"},
        Mismatch{"Exchange",
                 [](ProcessGroup& world) {
                   if (world.rank() == 0) {
                     world.split(0, 0, "half");
                   } else {
                     world.barrier();
                   }
                 },
                 "rank 0 called exchange", "rank 1 called barrier"},
        Mismatch{"Message",
                 [](ProcessGroup& world) {
                   if (world.rank() == 0) {
                     world.send(Tensor::zeros({4}), 1).wait();
                     world.barrier();
                   } else {
                     world.recv(Tensor::zeros({5}), 0).wait();
                   }
                 },
                 "rank 0 called send f32[4] to rank 1",
                 "rank 1 called recv f32[5] from rank 0"},
        Mismatch{"Counts",
                 [](ProcessGroup& world) {
                   const Tensor x = Tensor::zeros({4});
                   const Tensor y = Tensor::zeros({4});
                   if (world.rank() == 0) {
                     world.all_to_all_v(y, x, {1, 3}, {1, 3}).wait();
                   } else {
                     world.all_to_all_v(y, x, {2, 2}, {2, 2}).wait();
                   }
                 },
                 "counts of all_to_all_v over 'world' do not match: rank",
                 "elements to rank"},
        Mismatch{"Subgroup",
                 [](ProcessGroup& world) {
                   world.subgroup(world.rank() == 0 ? std::vector<int>{0, 1}
                                                    : std::vector<int>{1, 0},
                                  "pair");
                   world.barrier();
                 },
                 "[0, 1] 'pair'", "[1, 0] 'pair'"}),
    [](const ::testing::TestParamInfo<Mismatch>& info) {
      return std::string(info.param.name);
    });

// --- Deadlocks and timeouts --------------------------------------------------

TEST(ThreadDeadlock, TwoReceiversAreACycle) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    world.recv(Tensor::zeros({4}), 1 - world.rank()).wait();
  });
  expect_part(outcome.first_cause, "deadlock: ");
  expect_part(
      outcome.first_cause,
      "rank 0 waits for rank 1 in recv f32[4] from rank 1 over 'world'");
  expect_part(
      outcome.first_cause,
      "rank 1 waits for rank 0 in recv f32[4] from rank 0 over 'world'");
}

TEST(ThreadDeadlock, LargeSendsBeforeReceivesAreACycle) {
  const Outcome outcome = run(3, [](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({1 << 20});
    world.send(x, (world.rank() + 1) % 3).wait();
    world.recv(x, (world.rank() + 2) % 3).wait();
  });
  expect_part(outcome.first_cause, "deadlock: ");
  expect_part(outcome.first_cause, "rank 2 waits for rank 0 in send");
}

TEST(ThreadDeadlock, TwoGroupsInOppositeOrderAreACycle) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    const auto a = world.subgroup({0, 1}, "a");
    const auto b = world.subgroup({0, 1}, "b");
    (world.rank() == 0 ? a : b)->barrier();
    (world.rank() == 0 ? b : a)->barrier();
  });
  expect_part(outcome.first_cause,
              "rank 0 waits for rank 1 in barrier over 'a'");
  expect_part(outcome.first_cause,
              "rank 1 waits for rank 0 in barrier over 'b'");
}

TEST(ThreadDeadlock, ACycleThroughAsynchronousWorkIsFound) {
  const Outcome outcome = run(3, [](ProcessGroup& world) {
    const Tensor x = Tensor::zeros({8});
    const Tensor y = Tensor::zeros({8});
    if (world.rank() == 2) {
      world.recv(x, 0).wait();  // rank 0 sends only after the all-reduce
      world.all_reduce(y).wait();
    } else {
      Work sum = world.all_reduce(y);
      sum.wait();
      if (world.rank() == 0) world.send(x, 2).wait();
    }
  });
  expect_part(outcome.first_cause, "deadlock: ");
  expect_part(outcome.first_cause, "rank 2 waits for rank 0 in recv f32[8]");
  expect_part(outcome.first_cause, "waits for rank 2 in all_reduce f32[8]");
}

TEST(ThreadDeadlock, ManyAsynchronousCallsAreNoCycle) {
  run_ranks(2, [](ProcessGroup& world) {
    const auto a = world.subgroup({0, 1}, "a");
    const auto b = world.subgroup({0, 1}, "b");
    const Tensor x = Tensor::zeros({1 << 18});
    const Tensor y = Tensor::zeros({1 << 18});
    for (int step = 0; step < 20; ++step) {
      Work first =
          (world.rank() == 0 ? a : b)->all_reduce(world.rank() == 0 ? x : y);
      Work second =
          (world.rank() == 0 ? b : a)->all_reduce(world.rank() == 0 ? y : x);
      first.wait();
      second.wait();
    }
  });
}

TEST(ThreadTimeout, NamesWhoIsMissing) {
  LaunchOptions options;
  options.timeout = std::chrono::milliseconds(200);
  std::atomic<bool> stop{false};
  std::atomic<int> num_ready{0};
  const Outcome outcome = run(
      3,
      [&](ProcessGroup& world) {
        if (world.rank() == 1) {
          // Busy elsewhere: no cycle, no end, only late.
          while (!stop)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        const Tensor x = Tensor::zeros({6});
        // The first patience begins when both are at their calls.
        ++num_ready;
        while (num_ready < 2) std::this_thread::yield();
        try {
          world.all_reduce(x).wait();
        } catch (const Error&) {
          stop = true;
          throw;
        }
      },
      options);
  expect_part(
      outcome.first_cause,
      "timeout after 200 ms: rank 1 did not join all_reduce f32[6] over "
      "'world'");
}

TEST(ThreadTimeout, CanBeSetOnAGroup) {
  std::atomic<bool> stop{false};
  const Outcome outcome = run(2, [&](ProcessGroup& world) {
    if (world.rank() == 1) {
      while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    world.set_timeout(std::chrono::milliseconds(50));
    try {
      world.recv(Tensor::zeros({6}), 1).wait();
    } catch (const Error&) {
      stop = true;
      throw;
    }
  });
  expect_part(outcome.first_cause, "timeout after 50 ms: rank 1 did not join");
}

TEST(ThreadFailure, BuffersOfDroppedWorkStayAlive) {
  run_ranks(2, [](ProcessGroup& world) {
    for (int i = 0; i < 20; ++i) {
      // Nobody keeps the handle or the tensor.
      world.all_reduce(Tensor::full({300000}, 1));
    }
    Tensor x = Tensor::full({10}, 1);
    world.all_reduce(x).wait();
    SB_CHECK(x.to_vector<double>()[9] == 2, "the last sum is wrong");
  });
}

TEST(RunRanks, RejectsImpossibleWorlds) {
  const auto nothing = [](ProcessGroup&) {};
  EXPECT_THROW(run_ranks(0, nothing), Error);
  LaunchOptions options;
  options.backend = "mpi";
  const std::string error = error_of([&] { run_ranks(1, nothing, options); });
  expect_part(error, "backend 'mpi' is unknown");
}

TEST(RunRanks, GivesEachRankADeviceOfItsOwn) {
  LaunchOptions options;
  options.device_memory_bytes = 1 << 20;
  options.deterministic = true;
  std::vector<std::string> devices(3);
  run_ranks(
      3,
      [&](ProcessGroup& world) {
        const RankContext& context = RankContext::current();
        SB_CHECK(context.rank == world.rank(), "rank of the context");
        SB_CHECK(context.num_threads >= 1, "threads of the context");
        SB_CHECK(context.deterministic, "deterministic mode of the context");
        SB_CHECK(context.device.capacity_bytes() == 1 << 20, "capacity");
        devices[static_cast<std::size_t>(world.rank())] = context.device.name();
      },
      options);
  EXPECT_EQ(devices, (std::vector<std::string>{"cpu:0", "cpu:1", "cpu:2"}));
}

}  // namespace
}  // namespace shardbook
