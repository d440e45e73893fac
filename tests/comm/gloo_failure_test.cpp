// The other ranks after one process has failed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>

#include "comm/processes.h"
#include "core/check.h"
#include "core/tensor.h"
#include "tests/comm/mismatch_cases.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kAllReduce =
    "(while rank 0 was in all_reduce f32[10] over 'world')";

Tensor ten() { return Tensor::zeros({10}); }

// Runs ranks that should fail, and keeps the error of each.
class GlooFailure : public ::testing::Test {
 protected:
  // The error of the whole run; "" if there was none.
  std::string run(int world_size,
                  const std::function<void(ProcessGroup&)>& body) {
    const std::filesystem::path folder = folder_.path();
    try {
      run_processes(
          world_size,
          [&](ProcessGroup& world) -> std::string {
            try {
              body(world);
            } catch (const std::exception& error) {
              write_bytes(folder / std::to_string(world.rank()), error.what());
              throw;
            }
            return "";
          },
          options_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  std::string said_by(int rank) const {
    return read_bytes(folder_ / std::to_string(rank));
  }

  void TearDown() override {
    // Neither a running process nor a zombie is left.
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
  }

  TempFolder folder_;
  LaunchOptions options_;
};

TEST_F(GlooFailure, ThrowingRankIsNamedWithItsReason) {
  const std::string error = run(3, [](ProcessGroup& world) {
    SB_CHECK(world.rank() != 2, "no more data");
    world.all_reduce(ten()).wait();
  });
  EXPECT_EQ(error, "rank 2 failed: no more data");
  EXPECT_EQ(said_by(0),
            "rank 2 failed: no more data " + std::string(kAllReduce));
  EXPECT_THAT(said_by(1), HasSubstr("(while rank 1 was in all_reduce"));
}

TEST_F(GlooFailure, KilledRankIsNamed) {
  const std::string error = run(3, [](ProcessGroup& world) {
    world.barrier();
    if (world.rank() == 1) raise(SIGKILL);
    world.all_reduce(ten()).wait();
  });
  EXPECT_THAT(error, HasSubstr("rank 1 failed: its process was killed by "
                               "signal 9"));
  // It may not have learned that rank 1 was in the barrier, too.
  EXPECT_THAT(said_by(0), AllOf(HasSubstr("rank 1 failed"),
                                HasSubstr("(while rank 0 was in ")));
  EXPECT_THAT(said_by(2), HasSubstr("rank 1 failed"));
}

TEST_F(GlooFailure, KilledFirstRankIsNamedAlsoWhenItServesTheRendezvous) {
  for (const bool serves : {false, true}) {
    if (serves) options_.rendezvous = "file:" + (folder_ / "meet");
    const std::string error = run(3, [](ProcessGroup& world) {
      world.barrier();
      if (world.rank() == 0) raise(SIGKILL);
      world.all_reduce(ten()).wait();
    });
    EXPECT_THAT(error, HasSubstr("rank 0 failed: its process was killed"));
    EXPECT_THAT(said_by(1), HasSubstr("rank 0 failed"));
    EXPECT_THAT(said_by(2), HasSubstr("rank 0 failed"));
  }
}

TEST_F(GlooFailure, RankKilledInTheMiddleOfALargeMessageIsNamed) {
  const std::string error = run(3, [](ProcessGroup& world) {
    const Tensor large = Tensor::zeros({1 << 24});
    std::thread killer;
    if (world.rank() == 1) {
      killer = std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        raise(SIGKILL);
      });
    }
    for (;;) world.all_reduce(large).wait();
  });
  EXPECT_THAT(error, HasSubstr("rank 1 failed: its process was killed"));
  EXPECT_THAT(said_by(0), HasSubstr("rank 1 failed"));
  EXPECT_THAT(said_by(2), HasSubstr("rank 1 failed"));
}

TEST_F(GlooFailure, ExitingRankIsNamedWithItsStatus) {
  const std::string error = run(2, [](ProcessGroup& world) {
    if (world.rank() == 1) _exit(3);
    world.all_reduce(ten()).wait();
  });
  EXPECT_THAT(error, HasSubstr("rank 1 failed: its process exited with "
                               "status 3"));
  EXPECT_THAT(said_by(0), HasSubstr("rank 1 failed"));
}

TEST_F(GlooFailure, RankThatReturnsEarlyIsNamed) {
  const std::string error = run(3, [](ProcessGroup& world) {
    if (world.rank() == 1) return;
    world.all_reduce(ten()).wait();
  });
  EXPECT_EQ(error, "rank 1 failed: it ended without joining");
  EXPECT_THAT(said_by(0), HasSubstr(kAllReduce));
}

TEST_F(GlooFailure, FailureReachesAsynchronousCallsAndSubgroups) {
  const std::string error = run(4, [](ProcessGroup& world) {
    const auto pair = world.split(world.rank() % 2, 0, "pair");
    SB_CHECK(world.rank() != 3, "gone");
    Work first = pair->all_reduce(ten());
    Work second = world.all_reduce(ten());
    first.wait();
    second.wait();
  });
  EXPECT_EQ(error, "rank 3 failed: gone");
  EXPECT_THAT(said_by(1), HasSubstr("gone (while rank 1 was in all_reduce"));
  EXPECT_THAT(said_by(0), HasSubstr("rank 3 failed: gone"));
}

TEST_F(GlooFailure, RankThatWaitsInRecvHears) {
  const std::string error = run(2, [](ProcessGroup& world) {
    SB_CHECK(world.rank() != 0, "nothing to send");
    world.recv(ten(), 0).wait();
  });
  EXPECT_EQ(error, "rank 0 failed: nothing to send");
  EXPECT_THAT(said_by(1), HasSubstr("in recv f32[10] from rank 0"));
}

// For single calls: on a busy machine ranks need longer to meet.
constexpr std::chrono::milliseconds kShort(300);

TEST_F(GlooFailure, TimeoutNamesWhoIsMissing) {
  const std::string error = run(3, [](ProcessGroup& world) {
    world.set_timeout(kShort);
    if (world.rank() == 2) sleep(60);
    world.all_reduce(ten()).wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("timeout after 300 ms: rank 2 did not "
                                     "join all_reduce f32[10] over 'world'"),
                           HasSubstr("in which ranks 0, 1 wait")));
  EXPECT_THAT(said_by(1), HasSubstr("rank 2 did not join"));
}

TEST_F(GlooFailure, TimeoutNamesWhoIsAtTheEndOfTheChainOfWaits) {
  const std::string error = run(3, [](ProcessGroup& world) {
    world.set_timeout(kShort);
    if (world.rank() == 2) sleep(60);
    const int next = world.rank() + 1;
    // A message that no receiver waits for must not make rank 1 look guilty.
    if (world.rank() == 0) world.send(Tensor::zeros({7}), next, /*tag=*/1);
    world.recv(ten(), next).wait();
  });
  EXPECT_THAT(error, HasSubstr("rank 2 did not join recv f32[10] from rank 2 "
                               "over 'world', in which rank 1 waits"));
}

TEST_F(GlooFailure, TimeoutTellsACircleOfWaits) {
  const std::string error = run(3, [](ProcessGroup& world) {
    world.set_timeout(kShort);
    world.recv(ten(), (world.rank() + 1) % 3).wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("all ranks wait for each other"),
                           HasSubstr("rank 2 waits for rank 0 in recv")));
}

TEST_F(GlooFailure, MessagesThatNobodyWaitsForMayTakeLong) {
  EXPECT_EQ(run(2,
                [](ProcessGroup& world) {
                  world.set_timeout(kShort);
                  if (world.rank() == 0) {
                    world.send(ten(), 1);
                    std::this_thread::sleep_for(std::chrono::seconds(1));
                  } else {
                    std::this_thread::sleep_for(std::chrono::milliseconds(900));
                    world.recv(ten(), 0).wait();
                  }
                }),
            "");
}

// --- Calls that differ

class GlooMismatch : public GlooFailure,
                     public ::testing::WithParamInterface<test::Mismatch> {};

TEST_P(GlooMismatch, NamesBothRanksAndBothCalls) {
  const std::string error =
      run(2, [](ProcessGroup& world) { GetParam().run(world); });
  EXPECT_THAT(error,
              AllOf(HasSubstr("do not match"),
                    HasSubstr("rank 0 called " + GetParam().first_text),
                    HasSubstr("rank 1 called " + GetParam().second_text)));
  EXPECT_THAT(said_by(0), HasSubstr("do not match"));
  EXPECT_THAT(said_by(1), HasSubstr("do not match"));
}

INSTANTIATE_TEST_SUITE_P(, GlooMismatch,
                         ::testing::ValuesIn(test::mismatches()),
                         [](const auto& info) {
                           return std::string(info.param.name);
                         });

TEST_F(GlooFailure, AllToAllCountsMustAgree) {
  const std::string error = run(2, [](ProcessGroup& world) {
    const std::int64_t other = world.rank() == 0 ? 5 : 4;
    std::vector<std::int64_t> send = {1, 1}, recv = {1, 1};
    send[static_cast<std::size_t>(1 - world.rank())] = 5;
    recv[static_cast<std::size_t>(1 - world.rank())] = other;
    world
        .all_to_all_v(Tensor::zeros({1 + other}), Tensor::zeros({6}), send,
                      recv)
        .wait();
  });
  EXPECT_THAT(error, HasSubstr("rank 0 sends 5 elements to rank 1, which "
                               "expects 4"));
}

}  // namespace
}  // namespace shardbook
