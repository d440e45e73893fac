#pragma once

// Ranks that are processes.
//
//   int main() {
//     // "--backend gloo --world-size 4": in the process that the user started
//     // this runs four copies of the program and returns their exit status; in
//     // a copy, or under torchrun, mpirun or srun, it returns nothing.
//     if (std::optional<int> status = launch_processes(4, options)) {
//       return *status;
//     }
//     run_ranks(4, body, options);   // runs body once: as this process's rank
//     if (is_first_process()) print_results();
//   }
//
// The process that the user started becomes a supervisor: it passes on SIGINT,
// SIGTERM and SIGHUP, notices when a rank ends or is stopped, gives the others
// three seconds, kills those left and waits for all of them. Copies die with
// their supervisor.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch.h"

namespace shardbook {

/// The environment's description of a process that is a rank already.
struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< on this host
  int local_world_size = 1;  ///< ranks that share this host
  std::string launcher;      ///< "shardbook", "torchrun", "mpirun", "srun", ...
  /// The variable that gives the world size, such as "WORLD_SIZE=2".
  std::string size_variable;
  /// What tells this job from others on the same hosts: "mpirun 743964673".
  /// Empty where the launcher gives it no name. Ranks of different jobs do not
  /// meet.
  std::string job;
  /// All ranks are known to share this host.
  bool is_on_one_host = false;
  /// As LaunchOptions::rendezvous. rank_environment leaves it empty; run_ranks
  /// fills it in.
  std::string rendezvous;
  /// The launcher serves the rendezvous, otherwise rank 0 does.
  bool is_served_by_launcher = false;
};

/// Reads SHARDBOOK_RANK and SHARDBOOK_WORLD_SIZE, then the variables of
/// torchrun (RANK, WORLD_SIZE, LOCAL_RANK), mpirun and mpiexec of Open MPI
/// (OMPI_COMM_WORLD_*), MVAPICH2 (MV2_COMM_WORLD_*), MPICH, Intel MPI and PALS
/// (PMI_*), jsrun (JSM_NAMESPACE_*), Flux (FLUX_*) and srun (SLURM_*). Empty
/// where the process is no rank, or is the only one of a launcher other than
/// this library. Throws Error, which names the variable, on values that make no
/// sense.
///
/// Without LaunchOptions::rendezvous the ranks meet where SHARDBOOK_RENDEZVOUS,
/// or MASTER_ADDR and MASTER_PORT, say; else on loopback where they share a
/// host; else, under srun, on the first host of the step. Without MASTER_PORT,
/// and under torchrun, whose agent serves there, a job that has a name has a
/// port of its own.
std::optional<RankEnvironment> rank_environment();

/// True for the process that prints: rank 0, a process that is no rank, and any
/// process where rank_environment throws.
bool is_first_process();

/// Starts `world_size` copies of this program with the same arguments and
/// returns their exit status, or returns nothing in a process that is a rank
/// already. The status is 128 + n when signal n has reached the supervisor and
/// stopped the run; otherwise the smallest exit status of a rank other than 0;
/// kExitRunFailed when ranks did not exit but were killed. Call it before
/// anything that prints or starts threads; it watches the signals
/// (comm/signals.h). Throws Error where the environment has another number of
/// ranks.
std::optional<int> launch_processes(int world_size,
                                    const LaunchOptions& options = {});

/// Forks `world_size` ranks that run `body` over Gloo and end, and returns the
/// results of `body`, by rank; throws the first cause when a rank threw, ended
/// or was killed. Anything else that a body writes stays in its process. The
/// calling process must have no other threads (threads about to end have a
/// second to do so): a fork copies only the one that calls it.
std::vector<std::string> run_processes(
    int world_size, const std::function<std::string(ProcessGroup&)>& body,
    const LaunchOptions& options = {});

}  // namespace shardbook
