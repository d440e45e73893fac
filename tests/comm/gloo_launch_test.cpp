// Programs that run as several processes, and the environments of launchers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "comm/processes.h"
#include "comm/processes/rendezvous.h"
#include "core/check.h"
#include "core/tensor.h"
#include "tests/comm/program.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using test::free_port;
using test::Program;
using test::torchrun;
using test::Variables;
using ::testing::AllOf;
using ::testing::HasSubstr;

Variables ranks_that(int world_size, const std::string& scenario) {
  return test::rank_program("gloo", world_size, scenario);
}

TEST(GlooLaunch, StartsTheRanksAndShowsTheFirstOnesOutput) {
  Program ranks(ranks_that(3, "sum"));
  EXPECT_EQ(ranks.finish(), 0);
  EXPECT_EQ(ranks.output(), "sum 3 of 3\nsum 3 of 3\n");
}

TEST(GlooLaunch, ReturnsTheStatusOfARankThatThrows) {
  Program ranks(ranks_that(3, "throw"));
  EXPECT_EQ(ranks.finish(), 1);
  EXPECT_THAT(ranks.output(), HasSubstr("rank 1 failed: as asked"));
}

TEST(GlooLaunch, ReportsARankThatIsKilled) {
  Program ranks(ranks_that(3, "kill"));
  const int status = ranks.finish();
  // The other ranks have thrown, or the launcher was faster.
  EXPECT_TRUE(status == 1 || status == kExitRunFailed) << status;
  EXPECT_THAT(ranks.output(),
              AllOf(HasSubstr("rank 1 failed: its process was killed by "
                              "signal 9"),
                    HasSubstr("(while rank 0 was in ")));
}

TEST(GlooLaunch, PassesSignalsOn) {
  Program ranks(ranks_that(2, "wait"));
  ranks.read_until("ready");
  kill(ranks.pid(), SIGTERM);
  EXPECT_EQ(ranks.finish(), 128 + SIGTERM);
}

TEST(GlooLaunch, RanksEndWithTheirSupervisor) {
  Program ranks(ranks_that(2, "wait"));
  ranks.read_until("ready");
  kill(ranks.pid(), SIGKILL);
  // The pipe closes when the last process that holds it has ended.
  EXPECT_EQ(ranks.finish(), 128 + SIGKILL);
}

// Two processes as a foreign launcher would start them.
void expect_sum(const std::function<Variables(const std::string&)>& rank,
                const Variables& command = ranks_that(2, "sum")) {
  Program one(command, rank("0"));
  Program two(command, rank("1"));
  EXPECT_EQ(one.finish(), 0) << one.output();
  EXPECT_EQ(two.finish(), 0) << two.output();
  EXPECT_EQ(one.output(), "sum 1 of 2\nsum 1 of 2\n");
}

TEST(GlooLaunch, ReadsTheEnvironmentsOfLaunchers) {
  const int port = free_port();
  expect_sum([&](const std::string& rank) {
    return torchrun(std::stoi(rank), 2, port, {"LOCAL_RANK=" + rank});
  });
  const std::string meeting =
      "SHARDBOOK_RENDEZVOUS=tcp:127.0.0.1:" + std::to_string(free_port());
  expect_sum([&](const std::string& rank) {
    return Variables{"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=" + rank,
                     meeting};
  });
  // srun was typed on a login node, whose address no rank can serve.
  expect_sum([](const std::string& rank) {
    return Variables{"SLURM_NTASKS=2",
                     "SLURM_STEP_ID=0",
                     "SLURM_JOB_ID=17",
                     "SLURM_NTASKS_PER_NODE=2",
                     "SLURM_LAUNCH_NODE_IPADDR=203.0.113.5",
                     "SLURM_PROCID=" + rank,
                     "SLURM_LOCALID=" + rank};
  });
}

// Hydra gives a job no name: its own process names the job. The scripts do not,
// because each rank has one of its own.
TEST(GlooLaunch, RanksMayBeStartedByScripts) {
  expect_sum(
      [](const std::string& rank) {
        return Variables{"PMI_RANK=" + rank, "PMI_SIZE=2", "PMI_FD=9",
                         "MPI_LOCALRANKID=" + rank, "MPI_LOCALNRANKS=2"};
      },
      {"sh", "-c", ranks_that(2, "sum")[0] + " gloo 2 sum; exit $?"});
}

TEST(GlooLaunch, JobsThatMeetAtOnePortDoNotMix) {
  const int port = free_port();
  const auto start = [&](int rank, const std::string& job) {
    return std::make_unique<Program>(
        ranks_that(2, "sum"),
        torchrun(rank, 2, port, {"TORCHELASTIC_RUN_ID=" + job}));
  };
  const auto one = start(0, "first");
  const auto strange_one = start(1, "second");
  const auto strange_two = start(0, "second");
  const auto two = start(1, "first");
  for (const auto* each : {&one, &two, &strange_one, &strange_two}) {
    EXPECT_EQ((*each)->finish(), 0) << (*each)->output();
  }
}

// As operators of Kubernetes name the host of rank 0; 127.0.0.2 is its address
// on the network here.
TEST(GlooLaunch, RankZeroMayKnowItsHostByAnotherName) {
  const std::string port = std::to_string(free_port());
  expect_sum([&](const std::string& rank) {
    return Variables{
        "RANK=" + rank, "WORLD_SIZE=2", "MASTER_PORT=" + port,
        rank == "0" ? "MASTER_ADDR=localhost" : "MASTER_ADDR=127.0.0.2"};
  });
}

TEST(GlooLaunch, RefusesAnotherWorldSizeThanTheLaunchers) {
  Program rank(ranks_that(4, "sum"), torchrun(0, 2, 29500));
  EXPECT_EQ(rank.finish(), 1);
  EXPECT_EQ(rank.output(),
            "--world-size 4: torchrun has started 2 ranks (WORLD_SIZE=2); give "
            "--world-size 2\n");
}

TEST(GlooLaunch, RefusesNonsenseInTheEnvironment) {
  Program rank(ranks_that(2, "sum"), {"RANK=two", "WORLD_SIZE=2"});
  EXPECT_EQ(rank.finish(), 1);
  EXPECT_THAT(rank.output(), HasSubstr("RANK=two"));
}

TEST(GlooLaunch, RanksWithOtherOptionsAreRefusedWhenTheyMeet) {
  const int port = free_port();
  const auto rank = [&](int number, const std::string& agreed) {
    return torchrun(number, 3, port, {"SHARDBOOK_AGREED=" + agreed});
  };
  Program first(ranks_that(3, "sum"), rank(0, "0.1"));
  Program second(ranks_that(3, "sum"), rank(1, "0.1"));
  Program third(ranks_that(3, "sum"), rank(2, "0.25"));
  for (Program* each : {&first, &second, &third}) {
    EXPECT_EQ(each->finish(), 1);
    EXPECT_EQ(each->output(),
              "the ranks' options differ: --agreed is 0.1 on rank 0 and 0.25 "
              "on rank 2; start every rank with the same options\n");
  }
}

// --- Ranks that do not answer

// Three ranks started one by one. Their timeout also limits the time to meet,
// which on a busy machine may be a second.
constexpr char kPatience[] = "SHARDBOOK_TIMEOUT_MS=3000";

// Starts the ranks, of which `stops` stops itself, and returns the output of
// the other two.
std::vector<std::string> run_frozen(int stops) {
  const int port = free_port();
  std::vector<std::unique_ptr<Program>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<Program>(
        ranks_that(3, "chain"),
        torchrun(rank, 3, port,
                 {"SHARDBOOK_STOPS=" + std::to_string(stops), kPatience})));
  }
  std::vector<std::string> said;
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == stops) continue;
    Program& each = *ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(each.finish(), 1);
    said.push_back(each.output());
  }
  kill(ranks[static_cast<std::size_t>(stops)]->pid(), SIGKILL);
  return said;
}

TEST(GlooFrozen, IsNamedAtTheEndOfTheChainOfWaits) {
  const std::string chain =
      "timeout after 3000 ms: rank 2 does not answer: its process is stopped, "
      "or its host cannot be reached";
  for (const std::string& said : run_frozen(2))
    EXPECT_THAT(said, HasSubstr(chain));
}

TEST(GlooFrozen, IsNamedByItsPeersWhenItServesTheRendezvous) {
  // A peer's own timeout fires, or its line to rank 0 goes silent
  for (const std::string& said : run_frozen(0)) {
    EXPECT_THAT(said, HasSubstr("rank 0 does not answer: its process is "
                                "stopped, or its host"));
  }
}

TEST(GlooFrozen, IsKilledByTheLauncher) {
  Program ranks(ranks_that(3, "chain"), {kPatience});
  EXPECT_NE(ranks.finish(), 0);
  EXPECT_THAT(ranks.output(), HasSubstr("rank 2 does not answer"));
}

TEST(GlooFrozen, IsNamedAlsoAfterItsLastCall) {
  Program ranks(ranks_that(2, "end"), {kPatience});
  EXPECT_EQ(ranks.finish(), kExitRunFailed);
  EXPECT_THAT(ranks.output(), HasSubstr("rank 1 does not answer: its process "
                                        "is stopped"));
}

// --- Rendezvous

std::vector<std::string> sums(const std::string& rendezvous) {
  LaunchOptions options;
  options.rendezvous = rendezvous;
  options.timeout = std::chrono::seconds(20);
  return run_processes(
      3,
      [](ProcessGroup& world) {
        const Tensor x = Tensor::full({1}, world.rank());
        world.all_reduce(x).wait();
        return std::to_string(static_cast<int>(x.item()));
      },
      options);
}

const std::vector<std::string> kThrees = {"3", "3", "3"};

TEST(GlooRendezvous, ByFile) {
  const TempFolder temporary;
  const std::string& folder = temporary.path();
  EXPECT_EQ(sums("file:" + folder), kThrees);
  // Rank 0 has cleaned up, so the folder can be used again.
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  EXPECT_EQ(sums("file:" + folder), kThrees);
}

TEST(GlooRendezvous, ByAFolderThatAKilledRunHasUsed) {
  const TempFolder temporary;
  const std::string& folder = temporary.path();
  // Its port belongs to a program that accepts connections and says nothing.
  const auto silent = internal::listen_on({"127.0.0.1", 0});
  const std::string address =
      internal::host_port_text(internal::own_address(silent));
  RankEnvironment rank;
  rank.world_size = 2;
  rank.is_on_one_host = true;
  rank.rendezvous = "file:" + folder;
  LaunchOptions options;
  options.timeout = std::chrono::seconds(3);
  const auto meet = [&](int number) {
    rank.rank = number;
    return internal::make_rendezvous(rank, /*generation=*/0, options);
  };
  const auto first = meet(0);  // writes the file
  const auto files = [&] {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      names.push_back(file.path());
    }
    return names;
  };
  ASSERT_EQ(files().size(), 1u);
  std::ofstream(files()[0]) << "serial\n" << address << "\n";

  const auto second = meet(1);
  EXPECT_EQ(second.locate().serial, "serial");
  std::unique_ptr<internal::ControlLine> line;
  std::thread joining([&] {
    internal::ControlLine::Options joins;
    joins.locate = second.locate;
    joins.rank = 1;
    joins.world_size = 2;
    joins.timeout = options.timeout;
    line = std::make_unique<internal::ControlLine>(std::move(joins));
  });
  // It has connected to the silent program when that has a connection to take.
  pollfd waiting{silent.value(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 3000), 1);
  {
    const auto next = meet(0);
    joining.join();
    EXPECT_EQ(line->failure(), "");
  }
  EXPECT_TRUE(files().empty());
}

TEST(GlooRendezvous, ByAFolderKeepsTheAddressOfALaterRun) {
  const TempFolder temporary;
  RankEnvironment rank;
  rank.world_size = 2;
  rank.is_on_one_host = true;
  rank.rendezvous = "file:" + temporary.path();
  auto earlier = internal::make_rendezvous(rank, 0, {});
  const auto later = internal::make_rendezvous(rank, 0, {});
  earlier = {};
  rank.rank = 1;
  EXPECT_EQ(internal::make_rendezvous(rank, 0, {}).locate(), later.locate());
}

TEST(GlooRendezvous, ByTcpServedByRankZero) {
  EXPECT_EQ(sums("tcp:127.0.0.1:" + std::to_string(free_port())), kThrees);
}

TEST(GlooRendezvous, ByRedis) {
  const std::string port = std::to_string(free_port());
  Program server({"redis-server", "--port", port, "--bind", "127.0.0.1",
                  "--save", "", "--daemonize", "no"});
  server.read_until("eady to accept connections");
  if (server.output().find("eady to accept") == std::string::npos) {
    GTEST_SKIP() << "redis-server is not installed";
  }
  const std::string address = "redis:127.0.0.1:" + port;
  EXPECT_EQ(sums(address + "/one"), kThrees);
  EXPECT_EQ(sums(address + "/two"), kThrees);
  EXPECT_THAT(
      [&] { sums(address + "/one"); },
      ::testing::ThrowsMessage<Error>(HasSubstr("taken by an earlier job")));
  kill(server.pid(), SIGTERM);
}

TEST(GlooRendezvous, ExplainsAnAddressThatItCannotRead) {
  EXPECT_THAT([] { sums("carrier-pigeon:3"); },
              ::testing::ThrowsMessage<Error>(
                  HasSubstr("give tcp:HOST:PORT, file:FOLDER or redis:")));
  EXPECT_THAT([] { sums("tcp:localhost"); },
              ::testing::ThrowsMessage<Error>(HasSubstr("HOST:PORT")));
}

TEST(GlooRendezvous, MissingRanksAreNamed) {
  Program alone(ranks_that(2, "sum"),
                torchrun(0, 2, free_port(), {"SHARDBOOK_TIMEOUT_MS=500"}));
  EXPECT_EQ(alone.finish(), 1);
  EXPECT_THAT(alone.output(),
              HasSubstr("rank 1 did not join the rendezvous of 2 ranks, in "
                        "which rank 0 waits"));
}

// --- Processes of one that has threads

// A thread is listed for a moment after its join; wait until it disappears.
TEST(GlooFork, WaitsForAThreadThatIsEnding) {
  std::thread ending(
      [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  ending.detach();
  const TempFolder temporary;
  EXPECT_EQ(sums("file:" + temporary.path()), kThrees);
}

#ifndef __SANITIZE_THREAD__  // TSan runs its own thread
TEST(GlooFork, RefusesAProcessWithThreads) {
  std::promise<void> end;
  std::thread other([&] { end.get_future().wait(); });
  EXPECT_THAT(
      [] { sums("tcp:127.0.0.1:1"); },
      ::testing::ThrowsMessage<Error>(HasSubstr("this process has 2 threads")));
  end.set_value();
  other.join();
}
#endif

}  // namespace
}  // namespace shardbook
