// Ranks of backend nccl that are processes, each with a GPU of its own. They
// find each other like gloo's ranks; NCCL's stand-in lets them meet in a
// folder, where it records the calls of each.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "comm/processes.h"
#include "tests/comm/program.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using test::Program;
using test::Variables;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class NcclProcesses : public ::testing::Test {
 protected:
  // As torchrun starts a rank, on a machine with this many GPUs.
  std::unique_ptr<Program> start(int rank, int local_rank, int world_size,
                                 int num_gpus, const std::string& scenario,
                                 const Variables& more = {}) {
    Variables variables = test::torchrun(
        rank, world_size, port_, {"LOCAL_RANK=" + std::to_string(local_rank)});
    for (const Variables& each : {on_machine(num_gpus), more}) {
      variables.insert(variables.end(), each.begin(), each.end());
    }
    return std::make_unique<Program>(command(world_size, scenario), variables);
  }

  Variables command(int world_size, const std::string& scenario) const {
    return test::rank_program("nccl", world_size, scenario);
  }
  Variables on_machine(int num_gpus) const {
    return {"SHARDBOOK_CUDA_LIBRARY=" SHARDBOOK_EMULATED_LIBRARY,
            "SHARDBOOK_NCCL_LIBRARY=" SHARDBOOK_NCCL_STAND_IN,
            "SHARDBOOK_EMULATED_GPUS=" + std::to_string(num_gpus),
            "SHARDBOOK_STAND_IN_FOLDER=" + folder_.path()};
  }

  // "stand-in-77-0.join.1": "1 of 2", for every communicator that ranks joined
  // by an id; messages have communicators with other ids.
  std::map<std::string, std::string> joined() const {
    std::map<std::string, std::string> result;
    for (const auto& file :
         std::filesystem::directory_iterator(folder_.path())) {
      const std::string name = file.path().filename();
      if (name.find(".join.") == std::string::npos) continue;
      std::getline(std::ifstream(file.path()), result[name]);
    }
    return result;
  }

  const TempFolder folder_;
  const int port_ = test::free_port();
};

TEST_F(NcclProcesses, OneProcessIsAWorldOfOne) {
  const auto rank = start(0, 0, 1, 1, "all");
  EXPECT_EQ(rank->finish(), 0);
  EXPECT_EQ(rank->output(), "right on cuda:0\n");
}

// Local ranks in the other order: the GPU follows the local rank.
TEST_F(NcclProcesses, RanksJoinByTheIdOfRankZeroEachWithItsGpu) {
  const auto first = start(0, 1, 2, 2, "all");
  const auto second = start(1, 0, 2, 2, "all");
  const std::string id = "stand-in-" + std::to_string(first->pid()) + "-0";
  EXPECT_EQ(first->finish(), 0);
  EXPECT_EQ(second->finish(), 0);
  EXPECT_EQ(first->output(), "right on cuda:1\n");
  EXPECT_EQ(second->output(), "right on cuda:0\n");
  const auto ranks = joined();
  ASSERT_EQ(ranks.count(id + ".join.0"), 1u);
  ASSERT_EQ(ranks.count(id + ".join.1"), 1u);
  EXPECT_EQ(ranks.at(id + ".join.0"), "1 of 2");
  EXPECT_EQ(ranks.at(id + ".join.1"), "0 of 2");
}

TEST_F(NcclProcesses, AProgramStartsItsOwnRanks) {
  Program ranks(command(3, "launch"), on_machine(3));
  EXPECT_EQ(ranks.finish(), 0);
  EXPECT_EQ(ranks.output(), "right on cuda:0\n");
}

TEST_F(NcclProcesses, ARankThatDiesBeforeTheMeetingIsNamed) {
  Program ranks(command(3, "dies"), on_machine(3));
  EXPECT_NE(ranks.finish(), 0);
  EXPECT_THAT(ranks.output(),
              HasSubstr("rank 1 failed: its process was killed by signal 9"));
}

TEST_F(NcclProcesses, ARankThatNeverComesIsNamedByTheOthers) {
  const auto alone = start(0, 0, 2, 2, "all", {"SHARDBOOK_TIMEOUT_MS=500"});
  EXPECT_EQ(alone->finish(), 1);
  EXPECT_THAT(alone->output(),
              HasSubstr("rank 1 did not join the rendezvous of 2 ranks, in "
                        "which rank 0 waits"));
}

TEST_F(NcclProcesses, ARankThatDiesEndsWhatTheOthersWaitForOnTheDevice) {
  const auto first = start(0, 0, 2, 2, "kill");
  const auto second = start(1, 1, 2, 2, "kill");
  EXPECT_EQ(second->finish(), 128 + SIGKILL);
  EXPECT_EQ(first->finish(), 1);
  EXPECT_THAT(first->output(),
              AllOf(StartsWith("rank 1 failed: "), HasSubstr("while rank 0")));
}

TEST_F(NcclProcesses, MoreOfThemThanGpusAreRefused) {
  const auto rank = start(1, 1, 3, 2, "all");
  EXPECT_EQ(rank->finish(), 1);
  EXPECT_EQ(rank->output(),
            "--backend nccl: 3 ranks need 3 GPUs, 2 are visible; use --backend "
            "threads --device cuda to let ranks share them\n");
}

}  // namespace
}  // namespace shardbook
