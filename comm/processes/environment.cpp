// Reads the variables by which launchers describe a rank.

#include <cstdlib>
#include <initializer_list>

#include "comm/processes.h"
#include "core/check.h"

namespace shardbook {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return {};
  return std::string(value);
}

std::optional<int> number(const char* name) {
  const auto text = variable(name);
  if (!text) return {};
  SB_CHECK(text->size() <= 9 &&
               text->find_first_not_of("0123456789") == std::string::npos,
           "environment variable ", name, "=", *text,
           ": give a whole number of 0 or more");
  return std::stoi(*text);
}

// The first of these variables that is set.
std::optional<int> first_number(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const auto value = number(name)) return value;
  }
  return {};
}

struct Launcher {
  const char* name;
  std::initializer_list<const char*> rank;
  std::initializer_list<const char*> world_size;
  std::initializer_list<const char*> local_rank;
  std::initializer_list<const char*> local_world_size;
};

// In this order: srun also starts the agents of the others.
const Launcher kLaunchers[] = {
    {"shardbook",
     {"SHARDBOOK_RANK"},
     {"SHARDBOOK_WORLD_SIZE"},
     {"SHARDBOOK_LOCAL_RANK"},
     {"SHARDBOOK_LOCAL_WORLD_SIZE"}},
    {"torchrun",
     {"RANK"},
     {"WORLD_SIZE"},
     {"LOCAL_RANK"},
     {"LOCAL_WORLD_SIZE"}},
    {"mpirun",
     {"OMPI_COMM_WORLD_RANK", "PMI_RANK"},
     {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"},
     {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"},
     {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}},
    {"srun",
     {"SLURM_PROCID"},
     {"SLURM_NTASKS"},
     {"SLURM_LOCALID"},
     {"SLURM_NTASKS_PER_NODE"}},
};

// A shell inside of `salloc` has SLURM_PROCID 0 and is no rank; a step has a
// step id.
bool applies(const Launcher& launcher) {
  if (std::string(launcher.name) == "srun" && !variable("SLURM_STEP_ID")) {
    return false;
  }
  return first_number(launcher.rank) && first_number(launcher.world_size);
}

// Where the ranks of a job meet.
std::string meeting_place(const RankEnvironment& environment) {
  if (const auto given = variable("SHARDBOOK_RENDEZVOUS")) return *given;
  const auto address = variable("MASTER_ADDR");
  const auto port = number("MASTER_PORT");
  if (address && port) {
    // torchrun's agent keeps MASTER_PORT for a store of its own; we take the
    // next one.
    const bool is_taken =
        variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
    return "tcp:" + *address + ":" + std::to_string(*port + (is_taken ? 1 : 0));
  }
  if (environment.launcher == "srun") {
    // Steps of one job may run side by side, so the port depends on both.
    if (const auto host = variable("SLURM_LAUNCH_NODE_IPADDR")) {
      const int job = number("SLURM_JOB_ID").value_or(0) % 9973;
      const int step = number("SLURM_STEP_ID").value_or(0) % 97;
      return "tcp:" + *host + ":" +
             std::to_string(20000 + (job + step * 101) % 12000);
    }
  }
  if (environment.local_world_size == environment.world_size) {
    return "tcp:127.0.0.1:29400";
  }
  SB_FAIL(environment.launcher, " has started ", environment.world_size,
          " ranks on several hosts: set MASTER_ADDR and MASTER_PORT, or "
          "SHARDBOOK_RENDEZVOUS, to say where rank 0 serves");
}

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  for (const Launcher& launcher : kLaunchers) {
    if (!applies(launcher)) continue;
    RankEnvironment result;
    result.launcher = launcher.name;
    result.rank = *first_number(launcher.rank);
    result.world_size = *first_number(launcher.world_size);
    result.local_rank = first_number(launcher.local_rank).value_or(result.rank);
    result.local_world_size =
        first_number(launcher.local_world_size).value_or(result.world_size);
    SB_CHECK(result.world_size >= 1 && result.rank < result.world_size,
             launcher.name, " says rank ", result.rank, " of ",
             result.world_size, " ranks; a rank is less than their number");
    SB_CHECK(result.local_world_size >= 1 &&
                 result.local_world_size <= result.world_size,
             launcher.name, " says ", result.local_world_size,
             " ranks on this host of ", result.world_size, " in all");
    result.rendezvous = meeting_place(result);
    result.is_served_by_launcher =
        number("SHARDBOOK_SERVED_BY_LAUNCHER").value_or(0) != 0;
    return result;
  }
  return {};
}

bool is_first_process() {
  const auto environment = rank_environment();
  return !environment || environment->rank == 0;
}

}  // namespace shardbook
