// Failures among thread ranks end calls with an error at once.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/launch.h"
#include "core/check.h"
#include "tests/comm/mismatch_cases.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

using test::Mismatch;
using test::Outcome;
using test::zeros;
using Body = test::Call;

constexpr std::chrono::seconds kPatience(20);

Outcome run(int world_size, const Body& body, LaunchOptions options = {}) {
  if (options.timeout == LaunchOptions().timeout) options.timeout = kPatience;
  Outcome outcome = test::outcome_of(world_size, body, options);
  // No rank waits until its timeout
  for (const std::string& text : outcome.by_rank) {
    EXPECT_EQ(text.find("timeout after 20000 ms"), std::string::npos) << text;
  }
  return outcome;
}

// Rank `late` does nothing until another rank's call has failed.
Outcome run_without(int late, int world_size, const Body& body,
                    const LaunchOptions& options = {}) {
  std::atomic<bool> stop{false};
  const auto others_only = [&](ProcessGroup& world) {
    while (world.rank() == late && !stop) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (world.rank() == late) return;
    try {
      body(world);
    } catch (...) {
      stop = true;
      throw;
    }
  };
  return run(world_size, others_only, options);
}

TEST(ThreadFailure, ARankThatThrowsStopsAllOthersByName) {
  const Outcome outcome = run(4, [](ProcessGroup& world) {
    if (world.rank() == 2) throw Error("the disk is full");
    world.all_reduce(zeros(10)).wait();
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
  std::atomic<bool> neighbour_waits{false};
  const Outcome outcome = run_without(2, 3, [&](ProcessGroup& world) {
    // Only rank 0 has a short timeout, and its neighbour is not to blame.
    world.set_timeout(world.rank() == 0 ? std::chrono::milliseconds(300)
                                        : std::chrono::minutes(1));
    const Tensor x = zeros(10);
    // Rank 0's timeout starts when its neighbour is at its call.
    if (world.rank() == 1) neighbour_waits = true;
    while (!neighbour_waits) std::this_thread::yield();
    world.recv(x, world.rank() + 1).wait();
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
    world.broadcast(zeros(3), 0, "weights").wait();
  });
  const std::string start = "rank 1 failed: it ended without joining";
  expect_text(outcome.by_rank[0], {start});
  expect_text(outcome.by_rank[2],
              {"(while rank 2 was in broadcast f32[3] (root 0) 'weights' over "
               "'world')"});
  expect_text(outcome.first_cause, {start});
}

TEST(ThreadFailure, AReceiverWithoutSenderIsToldThatTheSenderEnded) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    if (world.rank() == 0) world.recv(zeros(3), 1).wait();
  });
  expect_text(outcome.first_cause, {"rank 1 failed: it ended without joining"});
  expect_text(outcome.first_cause, {"recv f32[3] from rank 1"});
}

TEST(ThreadFailure, AbortReachesEverybody) {
  const Outcome outcome = run(2, [](ProcessGroup& world) {
    if (world.rank() == 1) world.abort("interrupted");
    world.barrier("end of step");
  });
  for (int r : {0, 1}) {
    expect_text(
        outcome.by_rank[static_cast<std::size_t>(r)],
        {"rank 1 failed: interrupted (while rank " + std::to_string(r)});
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

class ThreadMismatches : public ::testing::TestWithParam<Mismatch> {};

TEST_P(ThreadMismatches, NameBothRanksAndBothCalls) {
  const Outcome outcome =
      run(2, [](ProcessGroup& world) { GetParam().run(world); });
  for (const std::string& text :
       {outcome.first_cause, outcome.by_rank[0], outcome.by_rank[1]}) {
    expect_text(text, {GetParam().first_text, GetParam().second_text});
  }
}

std::vector<Mismatch> all_mismatches() {
  std::vector<Mismatch> all = test::mismatches();
  for (Mismatch& each : all) {
    each.first_text = "rank 0 called " + each.first_text;
    each.second_text = "rank 1 called " + each.second_text;
  }
  const auto counts = [](std::int64_t own, std::int64_t other) {
    return [=](ProcessGroup& world) {
      world.all_to_all_v(zeros(4), zeros(4), {own, other}, {own, other}).wait();
    };
  };
  const auto pair = [](const std::vector<int>& members) {
    return [=](ProcessGroup& world) { world.subgroup(members, "pair"); };
  };
  all.push_back({"Exchange", [](ProcessGroup& g) { g.split(0, 0, "half"); },
                 [](ProcessGroup& g) { g.barrier(); }, "rank 0 called exchange",
                 "rank 1 called barrier"});
  all.push_back({"Counts", counts(1, 3), counts(2, 2),
                 "counts of all_to_all_v over 'world' do not match: rank",
                 "elements to rank"});
  all.push_back({"Subgroup", pair({0, 1}), pair({1, 0}), "[0, 1] 'pair'",
                 "[1, 0] 'pair'"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Calls, ThreadMismatches,
                         ::testing::ValuesIn(all_mismatches()),
                         [](const auto& info) {
                           return std::string(info.param.name);
                         });

// --- Deadlocks and timeouts --------------------------------------------------

struct Deadlock {
  const char* name;
  int world_size;
  Body body;
  std::vector<std::string> parts;
};

class ThreadDeadlocks : public ::testing::TestWithParam<Deadlock> {};

TEST_P(ThreadDeadlocks, AreCyclesOfWaits) {
  const std::string cause =
      run(GetParam().world_size, GetParam().body).first_cause;
  expect_text(cause, {"deadlock: "});
  expect_text(cause, GetParam().parts);
}

INSTANTIATE_TEST_SUITE_P(
    Calls, ThreadDeadlocks,
    ::testing::Values(
        Deadlock{
            "TwoReceivers",
            2,
            [](ProcessGroup& world) {
              world.recv(zeros(4), 1 - world.rank()).wait();
            },
            {"rank 0 waits for rank 1 in recv f32[4] from rank 1 over 'world'",
             "rank 1 waits for rank 0 in recv f32[4] from rank 0 over "
             "'world'"}},
        Deadlock{"LargeSendsBeforeReceives",
                 3,
                 [](ProcessGroup& world) {
                   const Tensor x = zeros(1 << 20);
                   world.send(x, (world.rank() + 1) % 3).wait();
                   world.recv(x, (world.rank() + 2) % 3).wait();
                 },
                 {"rank 2 waits for rank 0 in send"}},
        Deadlock{"TwoGroupsInOppositeOrder",
                 2,
                 [](ProcessGroup& world) {
                   const auto a = world.subgroup({0, 1}, "a");
                   const auto b = world.subgroup({0, 1}, "b");
                   (world.rank() == 0 ? a : b)->barrier();
                   (world.rank() == 0 ? b : a)->barrier();
                 },
                 {"rank 0 waits for rank 1 in barrier over 'a'",
                  "rank 1 waits for rank 0 in barrier over 'b'"}},
        Deadlock{"AsynchronousWork",
                 3,
                 [](ProcessGroup& world) {
                   const Tensor x = zeros(8), y = zeros(8);
                   if (world.rank() == 2) {
                     // Rank 0 sends only after the all-reduce
                     world.recv(x, 0).wait();
                     world.all_reduce(y).wait();
                   } else {
                     Work sum = world.all_reduce(y);
                     sum.wait();
                     if (world.rank() == 0) world.send(x, 2).wait();
                   }
                 },
                 {"rank 2 waits for rank 0 in recv f32[8]",
                  "waits for rank 2 in all_reduce f32[8]"}}),
    [](const auto& info) { return std::string(info.param.name); });

// Small messages are buffered unless the launch says otherwise. Then a send
// ends when it is received, whichever side comes first, and not before.
TEST(ThreadDeadlock, SmallSendsThatWaitForTheirReceivers) {
  const Body waits_at_once = [](ProcessGroup& world) {
    const Tensor x = zeros(4), y = zeros(4);
    Work sent = world.send(x, 1 - world.rank(), /*tag=*/0, "mine");
    sent.wait();
    world.recv(y, 1 - world.rank()).wait();
  };
  EXPECT_EQ(run(2, waits_at_once).first_cause, "");
  LaunchOptions options;
  options.rendezvous_sends = true;
  const std::string cause = run(2, waits_at_once, options).first_cause;
  expect_text(cause,
              {"deadlock: ",
               "rank 0 waits for rank 1 in send f32[4] to rank 1 'mine' over "
               "'world', which rank 1 does not receive yet",
               "rank 1 waits for rank 0 in send f32[4] to rank 0 'mine' over "
               "'world', which rank 0 does not receive yet"});
  const Body waits_later = [](ProcessGroup& world) {
    for (const std::int64_t size : {4, 0}) {
      const Tensor x = zeros(size), y = zeros(size);
      Work sent = world.send(x, 1 - world.rank());
      if (world.rank() == 0) world.barrier();
      SB_CHECK(world.rank() != 0 || !sent.done(), "nobody has received it");
      if (world.rank() == 1) world.barrier();
      world.barrier();
      world.recv(y, 1 - world.rank()).wait();
      sent.wait();
    }
  };
  EXPECT_EQ(run(2, waits_later, options).first_cause, "");
  options.backend = "gloo";
  EXPECT_EQ(run(2, waits_later, options).first_cause,
            "--rendezvous-sends: --backend gloo decides itself which messages "
            "it buffers; give --backend threads");
}

TEST(ThreadDeadlock, ManyAsynchronousCallsAreNoCycle) {
  run_ranks(2, [](ProcessGroup& world) {
    const auto a = world.subgroup({0, 1}, "a");
    const auto b = world.subgroup({0, 1}, "b");
    const Tensor x = zeros(1 << 18);
    const Tensor y = zeros(1 << 18);
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
  std::atomic<int> num_ready{0};
  const Outcome outcome = run_without(
      1, 3,
      [&](ProcessGroup& world) {
        const Tensor x = zeros(6);
        // The first timeout starts when both are at their calls.
        ++num_ready;
        while (num_ready < 2) std::this_thread::yield();
        world.all_reduce(x).wait();
      },
      options);
  expect_text(outcome.first_cause,
              {"timeout after 200 ms: rank 1 did not join all_reduce f32[6] "
               "over 'world'"});
}

TEST(ThreadFailure, BuffersOfDroppedWorkStayAlive) {
  run_ranks(2, [](ProcessGroup& world) {
    for (int i = 0; i < 20; ++i) {
      // The caller keeps neither the handle nor the tensor.
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
  expect_text(error, {"backend 'mpi' is unknown"});
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
