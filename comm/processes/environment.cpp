// Reads the variables by which launchers describe a rank.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <vector>

#include "comm/processes.h"
#include "comm/processes/job.h"
#include "comm/processes/rendezvous.h"
#include "comm/processes/socket.h"
#include "core/check.h"

namespace shardbook {
namespace {

// As many ranks as --world-size allows.
constexpr int kMostRanks = 1 << 16;

std::optional<std::string> variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return {};
  return std::string(value);
}

[[noreturn]] void refuse(const std::string& name, const std::string& reason) {
  SB_FAIL("environment variable ", name, "=", variable(name).value_or(""), ": ",
          reason);
}

bool is_number(const std::string& text) {
  return !text.empty() && text.size() <= 9 &&
         text.find_first_not_of("0123456789") == std::string::npos;
}

// `because` ends the sentence that refuses other values.
std::optional<int> number(const std::string& name, int least, int most,
                          const std::string& because = "") {
  const auto text = variable(name);
  if (!text) return {};
  const int value = is_number(*text) ? std::stoi(*text) : -1;
  if (value < least || value > most) {
    refuse(name, fmt::format("give a whole number from {} to {}{}", least, most,
                             because));
  }
  return value;
}

// --- Slurm -------------------------------------------------------------------

// Reads the tasks of each node from a text such as "2(x3),1".
std::vector<int> read_counts(const std::string& name, const std::string& text) {
  std::vector<int> counts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    std::string count = part, times = "1";
    const std::size_t at = part.find("(x");
    if (at != std::string::npos && part.back() == ')') {
      count = part.substr(0, at);
      times = part.substr(at + 2, part.size() - at - 3);
    }
    if (!is_number(count) || std::stoi(count) < 1 || !is_number(times) ||
        counts.size() + static_cast<std::size_t>(std::stoi(times)) >
            kMostRanks) {
      refuse(name, "it should list the tasks of each node, as 2(x3),1 does");
    }
    counts.insert(counts.end(), static_cast<std::size_t>(std::stoi(times)),
                  std::stoi(count));
  }
  return counts;
}

struct Hosts {
  std::string first;
  std::int64_t count = 0;
};

// Reads a list of hosts such as "node[01-03,7],other".
Hosts read_hosts(const std::string& name, const std::string& list) {
  const auto check = [&](bool is_form) {
    if (!is_form) {
      refuse(name, "it should list hosts, as node[01-03,7],other does");
    }
  };
  Hosts hosts;
  std::string host;
  std::int64_t num_alike = 1;
  for (std::size_t i = 0; i <= list.size(); ++i) {
    if (i == list.size() || list[i] == ',') {
      check(!host.empty());
      if (hosts.count == 0) hosts.first = host;
      hosts.count += num_alike;
      host.clear();
      num_alike = 1;
    } else if (list[i] == '[') {
      const std::size_t end = list.find(']', i);
      check(end != std::string::npos);
      std::istringstream in(list.substr(i + 1, end - i - 1));
      std::int64_t num_here = 0;
      for (std::string range; std::getline(in, range, ',');) {
        const std::size_t dash = std::min(range.find('-'), range.size());
        const std::string low = range.substr(0, dash);
        const std::string high =
            dash < range.size() ? range.substr(dash + 1) : low;
        check(is_number(low) && is_number(high) &&
              std::stoi(low) <= std::stoi(high));
        if (num_here == 0) host += low;
        num_here += std::stoi(high) - std::stoi(low) + 1;
      }
      check(num_here > 0);
      num_alike = std::min<std::int64_t>(num_alike * num_here, kMostRanks);
      i = end;
    } else {
      check(list[i] != ']');
      host += list[i];
    }
  }
  return hosts;
}

// The hosts of this step; the older variables may list the hosts of its job.
std::optional<Hosts> step_hosts() {
  for (const char* name :
       {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (const auto list = variable(name)) return read_hosts(name, *list);
  }
  return {};
}

// Tasks of this step on this host. A step may use a part of its job, so
// variables that describe the job are the last resort.
int tasks_on_this_host(int world_size) {
  for (const char* name :
       {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const auto text = variable(name);
    if (!text) continue;
    const std::vector<int> counts = read_counts(name, *text);
    if (std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) !=
        world_size) {
      continue;
    }
    const auto node = number("SLURM_NODEID", 0, kMostRanks);
    return node && *node < static_cast<int>(counts.size())
               ? counts[static_cast<std::size_t>(*node)]
               : *std::max_element(counts.begin(), counts.end());
  }
  auto nodes = number("SLURM_STEP_NUM_NODES", 1, kMostRanks);
  if (!nodes) nodes = number("SLURM_NNODES", 1, kMostRanks);
  if (!nodes) {
    if (const auto hosts = step_hosts()) nodes = static_cast<int>(hosts->count);
  }
  const int num_nodes = std::min(nodes.value_or(1), world_size);
  const int per_node = number("SLURM_NTASKS_PER_NODE", 1, kMostRanks)
                           .value_or((world_size + num_nodes - 1) / num_nodes);
  return std::min(per_node, world_size - num_nodes + 1);
}

// --- Launchers ---------------------------------------------------------------

struct Launcher {
  std::string name, rank, world_size, local_rank, local_world_size;
  // Gives the job's name, if one is set; `process`: with this variable, which
  // says that it is the launcher's own, the launcher's process does.
  std::string job, process;
};

// In this order: srun also starts the agents of the others, and several set
// variables of PMI as well.
std::vector<Launcher> launchers() {
  const std::string open_mpi =
      variable("PMIX_NAMESPACE") ? "PMIX_NAMESPACE" : "OMPI_MCA_ess_base_jobid";
  return {{"shardbook", "SHARDBOOK_RANK", "SHARDBOOK_WORLD_SIZE",
           "SHARDBOOK_LOCAL_RANK", "SHARDBOOK_LOCAL_WORLD_SIZE",
           "SHARDBOOK_JOB", ""},
          {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
           "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RUN_ID"},
          {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
           "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", open_mpi,
           ""},
          {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
           "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
           "PMIX_NAMESPACE", ""},
          {"mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
           "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
           "MPIRUN_ID", "PMI_FD"},
          {"flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID",
           "", "FLUX_JOB_ID", ""},
          // PALS, of Cray
          {"mpiexec", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID",
           "PALS_LOCAL_SIZE", "PALS_APID", ""},
          // Hydra, of MPICH and Intel MPI
          {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
           "MPI_LOCALNRANKS", "", "PMI_FD"},
          {"srun", "SLURM_PROCID",
           variable("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS"
                                            : "SLURM_NTASKS",
           "SLURM_LOCALID", "", "SLURM_JOB_ID", ""}};
}

bool applies(const Launcher& launcher) {
  if (!variable(launcher.rank)) return false;
  // The shells of sbatch and salloc have SLURM_PROCID=0 and are no tasks of a
  // step: they have no step id, or one near 2^32.
  const auto step = variable("SLURM_STEP_ID");
  const bool is_slurm_task = step && step->size() <= 9;
  if (launcher.name == "srun") return is_slurm_task;
  if (launcher.name == "mpiexec")
    return variable(launcher.local_rank).has_value();
  // srun --mpi=pmi2 sets PMI_RANK too; Slurm's variables tell more.
  return launcher.rank != "PMI_RANK" || !is_slurm_task ||
         variable(launcher.local_world_size);
}

// How many ranks share this host, where no variable gives it.
int ranks_on_this_host(const Launcher& launcher, int world_size) {
  if (launcher.name == "srun") return tasks_on_this_host(world_size);
  const int nodes = launcher.name == "flux run"
                        ? number("FLUX_JOB_NNODES", 1, kMostRanks).value_or(1)
                        : 1;
  return (world_size + nodes - 1) / nodes;
}

std::string job_of(const Launcher& launcher, bool is_on_one_host) {
  auto id = variable(launcher.job);
  if (launcher.name == "shardbook") return id.value_or("");
  if (launcher.name == "srun") {
    id = id.value_or("") + "." + variable("SLURM_STEP_ID").value_or("");
  }
  // torchrun's name of a job to which the user gave none
  if (id == "none") id.reset();
  if (!id && is_on_one_host && variable(launcher.process)) {
    id = internal::launcher_process({launcher.rank, launcher.world_size});
  }
  return id ? fmt::format("{} {:.200}", launcher.name, *id) : "";
}

// Jobs side by side on a host have ports of their own.
int port_of_job(const std::string& job) {
  return 20000 + static_cast<int>(internal::job_number(job) % 12000);
}

// The place where the ranks of a job meet. Says that they share this host where
// no other host could find that place.
std::string meeting_place(RankEnvironment& environment) {
  if (const auto given = variable("SHARDBOOK_RENDEZVOUS")) {
    internal::check_rendezvous(
        "environment variable SHARDBOOK_RENDEZVOUS=" + *given, *given);
    return *given;
  }
  const std::string& job = environment.job;
  auto address = variable("MASTER_ADDR");
  auto port = number("MASTER_PORT", 1, 65535);
  // torchrun's agent keeps MASTER_PORT for a store of its own.
  if (port && variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True") {
    port = port_of_job(fmt::format("{} {}", job, *port));
  }
  if (!address && environment.local_world_size == environment.world_size) {
    address = "127.0.0.1";
    environment.is_on_one_host = true;
  }
  // Rank 0 runs on the first host of a step, and srun may run on another one.
  if (!address && environment.launcher == "srun") {
    if (const auto hosts = step_hosts()) address = hosts->first;
  }
  SB_CHECK(address, environment.launcher, " has started ",
           environment.world_size, " ranks (", environment.size_variable,
           ") on several hosts: give --rendezvous tcp:HOST:PORT or "
           "file:FOLDER, or set MASTER_ADDR and MASTER_PORT, to say where rank "
           "0 serves");
  return fmt::format("tcp:{}:{}", *address,
                     port.value_or(job.empty() ? 29400 : port_of_job(job)));
}

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  for (const Launcher& launcher : launchers()) {
    if (!applies(launcher)) continue;
    const auto size = number(launcher.world_size, 1, kMostRanks);
    if (!size) {
      refuse(launcher.rank,
             launcher.world_size + " is not set; set both, or neither");
    }
    RankEnvironment result;
    result.launcher = launcher.name;
    result.world_size = *size;
    result.size_variable = launcher.world_size + "=" + std::to_string(*size);
    const std::string because = ", as " + result.size_variable;
    result.rank = *number(launcher.rank, 0, *size - 1, because);
    // Many containers and shells are started as the only rank of a job. They
    // may start ranks of their own.
    if (*size == 1 && launcher.name != "shardbook") continue;
    const auto local_rank = number(launcher.local_rank, 0, *size - 1, because);
    const auto local_size =
        number(launcher.local_world_size, 1, *size, because);
    result.local_world_size = local_size.value_or(std::max(
        ranks_on_this_host(launcher, *size), local_rank.value_or(0) + 1));
    const bool is_known = local_size || launcher.local_world_size.empty();
    result.is_on_one_host = is_known && result.local_world_size == *size;
    result.job = job_of(launcher, result.is_on_one_host);
    result.local_rank =
        local_rank.value_or(result.rank % result.local_world_size);
    if (result.local_rank >= result.local_world_size) {
      refuse(launcher.local_rank,
             fmt::format("it should be less than {}={}",
                         launcher.local_world_size, result.local_world_size));
    }
    result.is_served_by_launcher =
        number("SHARDBOOK_SERVED_BY_LAUNCHER", 0, 1).value_or(0) == 1;
    return result;
  }
  return {};
}

bool is_first_process() {
  try {
    const auto environment = rank_environment();
    return !environment || environment->rank == 0;
  } catch (const Error&) {
    return true;
  }
}

namespace internal {

std::optional<RankEnvironment> launched_rank(int world_size,
                                             const LaunchOptions& options) {
  auto environment = rank_environment();
  if (!environment) return {};
  SB_CHECK(environment->world_size == world_size, "--world-size ", world_size,
           ": ", environment->launcher, " has started ",
           environment->world_size, " ranks (", environment->size_variable,
           "); give --world-size ", environment->world_size);
  if (options.rendezvous.empty()) {
    environment->rendezvous = meeting_place(*environment);
  } else {
    environment->rendezvous = options.rendezvous;
    environment->is_served_by_launcher = false;
  }
  return environment;
}

void check_processes(int world_size, const LaunchOptions& options) {
  if (!options.rendezvous.empty()) {
    check_rendezvous("--rendezvous " + options.rendezvous, options.rendezvous);
  }
  launched_rank(world_size, options);
  if (!options.network_interface.empty()) {
    interface_host(options.network_interface);
  }
}

}  // namespace internal
}  // namespace shardbook
