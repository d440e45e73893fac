// The programs under launchers, whose variables may describe a rank, another
// job, or nothing that makes sense.

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli/programs.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

constexpr char kTiny[] = "--steps 1 --batch 12 --seq 8 --data walk ";
constexpr char kTwo[] = "--backend gloo --cluster none --world-size 2 ";

Outcome ddp(const std::string& options, const std::string& variables) {
  return run("02_ddp", kTiny + options, variables);
}

// Two processes with these variables, each with its own, train as two ranks.
void expect_two_ranks(const std::string& options, const std::string& variables,
                      const std::string& first, const std::string& second) {
  const auto start = [&](const std::string& own) {
    return std::async(std::launch::async, ddp, kTwo + options,
                      variables + " " + own);
  };
  std::future<Outcome> one = start(first);
  std::future<Outcome> two = start(second);
  EXPECT_EQ(two.get().status, 0) << variables;
  const Outcome report = one.get();
  EXPECT_EQ(report.status, 0) << variables << "\n" << report.text;
  EXPECT_TRUE(has_text(report.text, "2 ranks")) << report.text;
}

TEST(Launchers, VariablesThatMakeNoSenseAreNamed) {
  for (const auto& [variables, named] :
       std::vector<std::pair<std::string, std::string>>{
           {"RANK=2 WORLD_SIZE=2", "RANK=2: "},
           {"RANK=-1 WORLD_SIZE=2", "RANK=-1: "},
           {"RANK=abc WORLD_SIZE=2", "RANK=abc: "},
           {"RANK=0 WORLD_SIZE=two", "WORLD_SIZE=two: "},
           {"RANK=0", "RANK=0: WORLD_SIZE is not set"},
           {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=9e9",
            "OMPI_COMM_WORLD_SIZE=9e9: "},
           {"SHARDBOOK_RANK=x SHARDBOOK_WORLD_SIZE=2", "SHARDBOOK_RANK=x: "}}) {
    for (const std::string backend : {"threads", "sim"}) {
      SCOPED_TRACE(variables);
      expect_sentence(ddp("--world-size 2 --backend " + backend, variables),
                      "error: environment variable " + named);
    }
  }
  expect_done(run("02_ddp", "--help", "RANK=abc WORLD_SIZE=2"));
}

TEST(Launchers, TheOnlyProcessOfAJobRunsAsIfItWereAlone) {
  for (const std::string variables :
       {"RANK=0 WORLD_SIZE=1 MASTER_ADDR=no.such.host MASTER_PORT=1",
        "SLURM_STEP_ID=0 SLURM_JOB_ID=1 SLURM_NTASKS=1 SLURM_PROCID=0 "
        "SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=4"}) {
    for (const std::string backend : {"threads", "gloo"}) {
      if (backend == "gloo" && !SHARDBOOK_HAVE_GLOO) continue;
      const Outcome outcome =
          ddp("--world-size 2 --backend " + backend, variables);
      EXPECT_EQ(outcome.status, 0) << variables << "\n" << outcome.text;
      EXPECT_FALSE(has_text(outcome.text, "warning")) << outcome.text;
    }
  }
}

TEST(Launchers, CopiesThatTrainAloneAreWarnedOfOnce) {
  const std::string warning =
      "warning: torchrun has started 2 copies of this program (WORLD_SIZE=2), "
      "and with --backend threads each of them does the whole run alone; give "
      "--backend gloo --world-size 2 to make them the ranks of one run, or "
      "start the program without torchrun\n";
  const Outcome first = ddp("--world-size 2", "RANK=0 WORLD_SIZE=2");
  EXPECT_EQ(first.status, 0);
  EXPECT_EQ(first.text.rfind(warning, 0), 0u) << first.text;
  const Outcome second = ddp("--world-size 2", "RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(second.status, 0);
  EXPECT_FALSE(has_text(second.text, "warning")) << second.text;
  const Outcome sim = run("00_single_device", "--backend sim --steps 1",
                          "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3");
  EXPECT_EQ(sim.status, 0);
  EXPECT_TRUE(has_text(sim.text,
                       "(OMPI_COMM_WORLD_SIZE=3), and with --backend "
                       "sim each"))
      << sim.text;
}

// DeepSpeed's launcher and torch.distributed.launch add it for each rank.
TEST(Launchers, TheLocalRankMayAlsoBeAnOption) {
  for (const std::string option : {"--local_rank=0", "--local-rank 0"}) {
    const Outcome alone = ddp("--world-size 2 " + option, "");
    EXPECT_EQ(alone.status, 0) << alone.text;
  }
  expect_sentence(
      ddp("--local_rank=1", ""),
      "error: --local_rank 1: no launcher has started this process, "
      "so it is 0; leave the option to the launcher");
  expect_sentence(ddp("--local_rank=1", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0"),
                  "error: --local_rank 1: the variables of torchrun give 0; ");
  expect_sentence(ddp("--local_rank=x", ""),
                  "error: --local_rank x: not an integer; give a value from 0");
  if (!SHARDBOOK_HAVE_GLOO) return;
  // Copies of the program have its options
  EXPECT_EQ(ddp(std::string(kTwo) + "--local_rank=0", "").status, 0);
}

TEST(Launchers, RanksOfMpirunOnTwoHostsMeetInAFolder) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  expect_two_ranks("--rendezvous file:" + (folder() / "meet"),
                   "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
                   "OMPI_COMM_WORLD_LOCAL_SIZE=1",
                   "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_RANK=1");
}

TEST(Launchers, TasksOfAStepMeetOnTheirHostAndNotOnTheLoginNode) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  expect_two_ranks("",
                   "SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=4 "
                   "SLURM_LAUNCH_NODE_IPADDR=203.0.113.5 SLURM_JOB_ID=" +
                       std::to_string(getpid()),
                   "SLURM_PROCID=0 SLURM_LOCALID=0",
                   "SLURM_PROCID=1 SLURM_LOCALID=1");
}

// With a cluster the run begins before its ranks meet: the status is still 2.
TEST(Launchers, MeetingsThatCannotBeAreRefusedInOneSentence) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  const std::string host =
      "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=1 ";
  for (const auto& [options, variables, sentence] :
       std::vector<std::array<std::string, 3>>{
           {"--world-size 2 --interface nosuch0", "",
            "--interface nosuch0: this host has no such network interface, or "
            "it has no address; give one of "},
           {"--world-size 2 --interface nosuch0", "RANK=0 WORLD_SIZE=2",
            "--interface nosuch0: this host"},
           {"--world-size 2 --rendezvous pigeon:3", "",
            "--rendezvous pigeon:3: give tcp:HOST:PORT, file:FOLDER or redis:"},
           {"--world-size 2 --rendezvous tcp:localhost", "",
            "--rendezvous tcp:localhost: give tcp:HOST:PORT"},
           {"--world-size 2", "RANK=0 WORLD_SIZE=2 SHARDBOOK_RENDEZVOUS=file:",
            "environment variable SHARDBOOK_RENDEZVOUS=file:: give "},
           {"--world-size 3", "RANK=0 WORLD_SIZE=2",
            "--world-size 3: torchrun has started 2 ranks (WORLD_SIZE=2); give "
            "--world-size 2"},
           {"--world-size 2", host,
            "mpirun has started 2 ranks (OMPI_COMM_WORLD_SIZE=2) on several "
            "hosts: give --rendezvous "},
           {"--world-size 2",
            "PMI_RANK=1 PMI_SIZE=2 PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=1",
            "mpiexec has started 2 ranks (PMI_SIZE=2) on several hosts: give "
            "--rendezvous "},
           {"--world-size 2", host + "MASTER_ADDR=localhost MASTER_PORT=70000",
            "environment variable MASTER_PORT=70000: "}}) {
    SCOPED_TRACE(options);
    expect_sentence(ddp("--backend gloo " + options, variables),
                    "error: " + sentence);
  }
}

}  // namespace
}  // namespace shardbook
