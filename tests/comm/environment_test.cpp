// The variables by which launchers describe a rank.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "comm/processes.h"
#include "comm/processes/job.h"
#include "comm/processes/rendezvous.h"
#include "core/check.h"

namespace shardbook {
namespace {

/// While it lives, no other launcher variables exist ("RANK=0 WORLD_SIZE=2").
/// The last value of a variable counts.
class OnlyThese {
 public:
  explicit OnlyThese(const std::string& variables) {
    clear();
    std::istringstream in(variables);
    for (std::string each; in >> each;) {
      const std::size_t end = each.find('=');
      setenv(each.substr(0, end).c_str(), each.substr(end + 1).c_str(), 1);
    }
  }
  ~OnlyThese() { clear(); }

 private:
  static void clear() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      for (const std::string start :
           {"RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "OMPI_", "PMI_",
            "PMIX_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "SHARDBOOK_RANK",
            "MV2_", "JSM_", "FLUX_", "PALS_", "SHARDBOOK_WORLD_SIZE",
            "SHARDBOOK_JOB", "SHARDBOOK_RENDEZVOUS"}) {
        if (text.rfind(start, 0) != 0) continue;
        names.push_back(text.substr(0, text.find('=')));
      }
    }
    for (const std::string& name : names) unsetenv(name.c_str());
  }
};

// "rank 1 of 4, local 1 of 2", or "no rank", or the error.
std::string described(const std::string& variables) {
  const OnlyThese only(variables);
  try {
    const auto rank = rank_environment();
    if (!rank) return "no rank";
    return fmt::format("rank {} of {}, local {} of {}", rank->rank,
                       rank->world_size, rank->local_rank,
                       rank->local_world_size);
  } catch (const Error& error) {
    return error.what();
  }
}

// The rendezvous of a rank in a world of two, or the error.
std::string meeting(const std::string& variables,
                    const std::string& rendezvous = "") {
  const OnlyThese only(variables);
  LaunchOptions options;
  options.rendezvous = rendezvous;
  try {
    const auto rank = rank_environment();
    return internal::launched_rank(rank ? rank->world_size : 1, options)
        ->rendezvous;
  } catch (const Error& error) {
    return error.what();
  }
}

// A task of a Slurm step; `more` may override its variables.
std::string task(int rank, int local_rank, int size,
                 const std::string& more = "") {
  return fmt::format(
      "SLURM_STEP_ID=3 SLURM_JOB_ID=17 SLURM_PROCID={} SLURM_LOCALID={} "
      "SLURM_NTASKS={} {}",
      rank, local_rank, size, more);
}

TEST(RankEnvironment, ReadsEachLauncher) {
  const std::string launchers[] = {
      "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
      "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 "
      "OMPI_COMM_WORLD_LOCAL_RANK=1 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=2",
      "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 "
      "MPI_LOCALNRANKS=2",
      "PMI_RANK=1 PMI_SIZE=4 PALS_LOCAL_RANKID=1 "
      "PALS_LOCAL_SIZE=2",
      "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=4 "
      "MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
      "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=4 "
      "JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2",
      "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 "
      "FLUX_JOB_NNODES=2 PMI_RANK=1 PMI_SIZE=4 PMI_FD=5",
      task(1, 1, 4, "SLURM_STEP_TASKS_PER_NODE=2(x2)")};
  for (const std::string& variables : launchers) {
    EXPECT_EQ(described(variables), "rank 1 of 4, local 1 of 2") << variables;
  }
  EXPECT_EQ(described(""), "no rank");
}

TEST(RankEnvironment, TheOnlyRankOfALauncherIsNoRank) {
  EXPECT_EQ(described("RANK=0 WORLD_SIZE=1"), "no rank");
  EXPECT_EQ(described(task(0, 0, 1, "SLURM_NTASKS_PER_NODE=4")), "no rank");
  // The single task may be a launcher that starts several ranks.
  EXPECT_EQ(described("RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 "
                      "OMPI_COMM_WORLD_SIZE=2"),
            "rank 1 of 2, local 1 of 2");
  // A single copy that this library started is a rank.
  EXPECT_EQ(described("SHARDBOOK_RANK=0 SHARDBOOK_WORLD_SIZE=1"),
            "rank 0 of 1, local 0 of 1");
}

TEST(RankEnvironment, ShellsOfAJobAreNoRanks) {
  EXPECT_EQ(described(task(0, 0, 4, "SLURM_STEP_ID=")), "no rank");
  // salloc's interactive step
  EXPECT_EQ(described(task(0, 0, 4, "SLURM_STEP_ID=4294967290")), "no rank");
}

TEST(RankEnvironment, AStepMayBeSmallerThanItsJob) {
  const std::string second = "rank 1 of 2, local 1 of 2";
  EXPECT_EQ(described(task(1, 1, 2, "SLURM_NTASKS_PER_NODE=4")), second);
  // One task on each of two nodes
  EXPECT_EQ(described(task(1, 0, 2,
                           "SLURM_NTASKS_PER_NODE=4 SLURM_STEP_NUM_NODES=2")),
            "rank 1 of 2, local 0 of 1");
  EXPECT_EQ(described(task(1, 1, 8, "SLURM_STEP_NUM_TASKS=2")), second);
  // The job's numbers of tasks, which do not apply to this step of two
  EXPECT_EQ(described(task(1, 1, 2, "SLURM_TASKS_PER_NODE=4(x2)")), second);
}

TEST(RankEnvironment, NodesOfAStepMayHaveDifferentNumbersOfTasks) {
  const std::string nodes =
      "SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_NTASKS_PER_NODE=4 SLURM_NODEID=";
  EXPECT_EQ(described(task(5, 1, 7, nodes + "2")), "rank 5 of 7, local 1 of 2");
  EXPECT_EQ(described(task(6, 0, 7, nodes + "3")), "rank 6 of 7, local 0 of 1");
}

// srun --mpi=pmi2 sets PMI_RANK without the hosts; Hydra's agents are tasks.
TEST(RankEnvironment, OfSrunAndMpirunTheOneThatKnowsTheHostCounts) {
  const std::string both =
      task(1, 0, 2, "SLURM_STEP_TASKS_PER_NODE=1(x2) PMI_RANK=1 PMI_SIZE=2 ");
  EXPECT_EQ(described(both), "rank 1 of 2, local 0 of 1");
  EXPECT_EQ(described(both + "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 "
                             "MPI_LOCALNRANKS=2"),
            "rank 3 of 4, local 1 of 2");
}

TEST(RankEnvironment, NamesTheVariableThatMakesNoSense) {
  const std::string counts = "it should list the tasks of each node, as ";
  const std::map<std::string, std::string> errors = {
      {"RANK=2 WORLD_SIZE=2",
       "RANK=2: give a whole number from 0 to 1, as WORLD_SIZE=2"},
      {"RANK=-1 WORLD_SIZE=2", "RANK=-1: give a whole"},
      {"RANK=99999999999999999999 WORLD_SIZE=2",
       "RANK=99999999999999999999: give a whole"},
      {"RANK=0 WORLD_SIZE=two",
       "WORLD_SIZE=two: give a whole number from 1 to 65536"},
      {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0: give"},
      {"RANK=0 WORLD_SIZE=4294967298", "WORLD_SIZE=4294967298: give"},
      {"RANK=1", "RANK=1: WORLD_SIZE is not set; set both, or neither"},
      {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=x",
       "LOCAL_RANK=x: give a whole number from 0 to 1"},
      {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2",
       "LOCAL_RANK=3: it should be less than LOCAL_WORLD_SIZE=2"},
      {"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3",
       "LOCAL_WORLD_SIZE=3: give a whole number from 1 to 2"},
      {"OMPI_COMM_WORLD_RANK=x OMPI_COMM_WORLD_SIZE=2",
       "OMPI_COMM_WORLD_RANK=x: give"},
      {"PMI_RANK=5 PMI_SIZE=2", "PMI_RANK=5: give"},
      {task(2, 0, 2), "SLURM_PROCID=2: give"},
      {task(0, 0, 2, "SLURM_NTASKS_PER_NODE=x"),
       "SLURM_NTASKS_PER_NODE=x: give"},
      {task(0, 0, 2, "SLURM_STEP_TASKS_PER_NODE=2(x"),
       "SLURM_STEP_TASKS_PER_NODE=2(x: " + counts},
      {task(0, 0, 2, "SLURM_STEP_TASKS_PER_NODE=1(x999999999)"),
       "SLURM_STEP_TASKS_PER_NODE=1(x999999999): " + counts},
      {task(0, 0, 2, "SLURM_STEP_TASKS_PER_NODE=0,2"),
       "SLURM_STEP_TASKS_PER_NODE=0,2: " + counts}};
  for (const auto& [variables, text] : errors) {
    const std::string said = described(variables);
    EXPECT_EQ(said.rfind("environment variable " + text, 0), 0u)
        << said << "\nshould begin with the variable and\n"
        << text;
    const OnlyThese only(variables);
    EXPECT_TRUE(is_first_process()) << "it reports the error";
  }
}

TEST(RankMeeting, IsWhereTorchrunSays) {
  const std::string rank = "RANK=0 WORLD_SIZE=2 ";
  EXPECT_EQ(meeting(rank), "tcp:127.0.0.1:29400");
  const std::string given = rank + "MASTER_ADDR=a MASTER_PORT=";
  EXPECT_EQ(meeting(given + "29500"), "tcp:a:29500");
  EXPECT_EQ(meeting(given + "65536"),
            "environment variable MASTER_PORT=65536: give a whole number from "
            "1 to 65535");
}

// torchrun's agent has a store of its own at MASTER_PORT, and the agent of the
// next job may have one at any other port near it.
TEST(RankMeeting, OfAgentsDiffersFromTheirs) {
  const auto port = [](const std::string& master_port, const std::string& id) {
    const std::string place = meeting(
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a TORCHELASTIC_USE_AGENT_STORE=True "
        "MASTER_PORT=" +
        master_port + id);
    EXPECT_EQ(place.rfind("tcp:a:", 0), 0u) << place;
    const int number = std::stoi(place.substr(6));
    EXPECT_TRUE(number >= 20000 && number < 32000) << place;
    return number;
  };
  EXPECT_EQ(port("29500", ""), port("29500", ""));
  EXPECT_NE(port("29500", ""), port("29501", ""));
  const std::string id = " TORCHELASTIC_RUN_ID=";
  EXPECT_NE(port("29500", id + "one"), port("29500", id + "two"));
}

TEST(RankMeeting, IsAskedForWhereNoOptionSaysIt) {
  const std::string one_of_two_hosts =
      "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "
      "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 ";
  EXPECT_EQ(meeting(one_of_two_hosts, "file:shared"), "file:shared");
  EXPECT_EQ(meeting(one_of_two_hosts + "MASTER_PORT=x", "tcp:a:1"), "tcp:a:1");
  EXPECT_EQ(meeting(one_of_two_hosts),
            "mpirun has started 2 ranks (OMPI_COMM_WORLD_SIZE=2) on several "
            "hosts: give --rendezvous tcp:HOST:PORT or file:FOLDER, or set "
            "MASTER_ADDR and MASTER_PORT, to say where rank 0 serves");
}

// srun may be typed on a login node.
TEST(RankMeeting, OfAStepIsOnItsFirstHost) {
  const auto of_step = [](const std::string& more) {
    const std::string place =
        meeting(task(0, 0, 2, "SLURM_LAUNCH_NODE_IPADDR=203.0.113.5 " + more));
    return place.substr(0, place.rfind(':'));
  };
  EXPECT_EQ(of_step(""), "tcp:127.0.0.1");
  for (const auto& [list, first] : std::map<std::string, std::string>{
           {"node[01-03,7],other", "node01"},
           {"node[7,01-03]", "node7"},
           {"a,b", "a"},
           {"rack[2-3]n[08-09]-ib,x", "rack2n08-ib"}}) {
    EXPECT_EQ(of_step("SLURM_STEP_NODELIST=" + list), "tcp:" + first);
    EXPECT_EQ(of_step("SLURM_JOB_NODELIST=" + list), "tcp:" + first);
  }
  // The job's host list; the step has only one of these hosts
  EXPECT_EQ(of_step("SLURM_JOB_NODELIST=node[1-4] SLURM_STEP_NUM_NODES=1"),
            "tcp:127.0.0.1");
  EXPECT_EQ(of_step("SLURM_STEP_NODELIST=node[3-4] "
                    "SLURM_JOB_NODELIST=node[1-4] MASTER_ADDR=here"),
            "tcp:here");
  EXPECT_EQ(of_step("SLURM_STEP_NODELIST=one"), "tcp:127.0.0.1");
  for (const std::string list :
       {"node[01-", "node[]", "a,,b", "a[2-1]", "a]"}) {
    EXPECT_EQ(meeting(task(0, 0, 2, "SLURM_STEP_NODELIST=" + list)),
              "environment variable SLURM_STEP_NODELIST=" + list +
                  ": it should list hosts, as node[01-03,7],other does");
  }
}

TEST(RankMeeting, OfStepsSideBySideDiffers) {
  EXPECT_NE(meeting(task(0, 0, 2, "SLURM_STEP_ID=1")),
            meeting(task(0, 0, 2, "SLURM_STEP_ID=2")));
  EXPECT_NE(meeting(task(0, 0, 2, "SLURM_JOB_ID=4294967295")),
            meeting(task(0, 0, 2, "SLURM_JOB_ID=4294967294")));
}

TEST(RankMeeting, OfJobsSideBySideDiffers) {
  const std::string rank =
      "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=2 ";
  EXPECT_EQ(meeting(rank), "tcp:127.0.0.1:29400");
  const std::string first = meeting(rank + "PMIX_NAMESPACE=743964673");
  EXPECT_EQ(first, meeting(rank + "PMIX_NAMESPACE=743964673"));
  EXPECT_NE(first, meeting(rank + "PMIX_NAMESPACE=743964674"));
  EXPECT_EQ(meeting(rank + "PMIX_NAMESPACE=1 MASTER_PORT=29500"),
            "tcp:127.0.0.1:29500");
}

// --- Names of jobs

std::string job(const std::string& variables) {
  const OnlyThese only(variables);
  return rank_environment()->job;
}

TEST(RankJob, HasTheNameThatItsLauncherGives) {
  for (const auto& [variables, name] : std::map<std::string, std::string>{
           {"RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a-b", "torchrun a-b"},
           {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=7",
            "mpirun 7"},
           {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "
            "OMPI_MCA_ess_base_jobid=7",
            "mpirun 7"},
           {"JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=2 PMIX_NAMESPACE=7",
            "jsrun 7"},
           {"MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 MPIRUN_ID=7",
            "mpirun 7"},
           {"FLUX_TASK_RANK=0 FLUX_JOB_SIZE=2 FLUX_JOB_ID=f7", "flux run f7"},
           {"PMI_RANK=0 PMI_SIZE=2 PALS_LOCAL_RANKID=0 PALS_APID=7",
            "mpiexec 7"},
           {task(0, 0, 2), "srun 17.3"},
           {"SHARDBOOK_RANK=0 SHARDBOOK_WORLD_SIZE=2 SHARDBOOK_JOB=7", "7"},
           // Ranks by hand, which may have been started in several terminals
           {"RANK=0 WORLD_SIZE=2", ""}}) {
    EXPECT_EQ(job(variables), name) << variables;
  }
}

// Agents and proxies are one process per host, so their jobs of several hosts
// have no name.
TEST(RankJob, IsTheProcessOfALauncherThatGivesNoName) {
  const std::string own = internal::process_name(getpid());
  const auto of_child = [](const std::string& variables) {
    const OnlyThese only(variables);
    int ends[2];
    if (pipe(ends) != 0) return std::string("no pipe");
    const pid_t child = fork();
    if (child == 0) {
      const std::string name = rank_environment()->job;
      _exit(write(ends[1], name.data(), name.size()) < 0);
    }
    close(ends[1]);
    char bytes[200];
    const ssize_t count = read(ends[0], bytes, sizeof bytes);
    close(ends[0]);
    waitpid(child, nullptr, 0);
    return std::string(bytes,
                       static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  };
  for (const std::string& variables :
       {std::string("PMI_RANK=1 PMI_SIZE=2 PMI_FD=6 MPI_LOCALRANKID=1 "
                    "MPI_LOCALNRANKS="),
        std::string("RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none "
                    "LOCAL_WORLD_SIZE=")}) {
    const std::string name = of_child(variables + "2");
    EXPECT_NE(name.find(own), std::string::npos) << name;
    EXPECT_EQ(of_child(variables + "1 LOCAL_RANK=0 MPI_LOCALRANKID=0"), "");
  }
}

}  // namespace
}  // namespace shardbook
