// Starts the ranks of backend "nccl" and ends them together.

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "comm/internal/backends.h"
#include "comm/internal/rank_device.h"
#include "comm/nccl/nccl_group.h"
#include "comm/processes/coordinator.h"
#include "comm/processes/job.h"
#include "comm/processes/rendezvous.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::internal {
namespace {

// `on_failure` learns of an exception of `body` before any other rank does.
void run_rank(const RankEnvironment& environment, std::uint64_t generation,
              const std::function<void(ProcessGroup&)>& body,
              const LaunchOptions& options,
              const std::function<void(std::exception_ptr)>& on_failure) {
  const int rank = environment.rank;
  const int num_local = environment.local_world_size;
  std::shared_ptr<NcclWorld> world;
  try {
    RankContext context(
        rank_device(rank, environment.local_rank, num_local, true, options),
        rank, std::max(1, available_cores() / num_local));
    context.deterministic = options.deterministic;
    const RankContext::Scope scope(context);
    world = std::make_shared<NcclWorld>(environment, generation, options,
                                        context.device);
    try {
      std::vector<int> ranks(static_cast<std::size_t>(environment.world_size));
      std::iota(ranks.begin(), ranks.end(), 0);
      NcclGroup group(world, "world", rank, std::move(ranks), "world",
                      options.timeout);
      body(group);
      world->leave();
    } catch (...) {
      const std::exception_ptr failure = std::current_exception();
      on_failure(failure);
      // End all waits for peers: the context waits for the device.
      world->give_up(current_reason());
      throw;
    }
  } catch (...) {
    on_failure(std::current_exception());
    throw;
  }
}

// Ranks that are threads meet like processes, at a coordinator of their own.
void run_threads(int world_size, const std::function<void(ProcessGroup&)>& body,
                 const LaunchOptions& options) {
  Coordinator::Options serving;
  serving.world_size = world_size;
  serving.job = process_name(getpid());
  serving.explain_end = [](int) { return "its thread ended"; };
  Coordinator coordinator(std::move(serving));

  std::mutex mutex;
  std::exception_ptr first_cause;
  const auto on_failure = [&](std::exception_ptr failure) {
    const std::lock_guard lock(mutex);
    if (first_cause == nullptr) first_cause = std::move(failure);
  };
  const auto run = [&](int rank) {
    RankEnvironment environment;
    environment.rank = environment.local_rank = rank;
    environment.world_size = environment.local_world_size = world_size;
    environment.launcher = "shardbook";
    environment.rendezvous = "tcp:" + host_port_text(coordinator.address());
    environment.job = process_name(getpid());
    environment.is_served_by_launcher = true;
    try {
      run_rank(environment, 0, body, options, on_failure);
    } catch (...) {
      // The others learn at once of a rank that never reached them.
      coordinator.fail("rank " + std::to_string(rank) +
                       " failed: " + current_reason());
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int r = 0; r < world_size; ++r) threads.emplace_back(run, r);
  } catch (...) {
    on_failure(std::current_exception());
    coordinator.fail("rank " + std::to_string(threads.size()) +
                     " failed: its thread did not start");
  }
  for (std::thread& thread : threads) thread.join();
  if (first_cause != nullptr) std::rethrow_exception(first_cause);
}

void check_nccl_ranks(int world_size, const LaunchOptions& options) {
  SB_CHECK(options.device != "cpu",
           "--backend nccl: it moves tensors of GPUs only; give --device cuda, "
           "or use --backend threads or gloo");
  check_processes(world_size, options);
  const std::string no_cuda = why_no_cuda();
  SB_CHECK(no_cuda.empty(), "--backend nccl: ", no_cuda);
  const std::string no_nccl = why_no_nccl();
  SB_CHECK(no_nccl.empty(), no_nccl);
  const auto environment = rank_environment();
  const int num_local =
      environment ? environment->local_world_size : world_size;
  const int num_gpus = cuda_runtime().count();
  SB_CHECK(num_local <= num_gpus, "--backend nccl: ", num_local, " ranks need ",
           num_local, " GPUs, ", num_gpus, num_gpus == 1 ? " is" : " are",
           " visible; use --backend threads --device cuda to let ranks share ",
           num_gpus == 1 ? "it" : "them");
}

// In a process that is a rank it runs `body` once, as that rank; in any other,
// the ranks are threads.
void run_nccl_ranks(int world_size,
                    const std::function<void(ProcessGroup&)>& body,
                    const LaunchOptions& options) {
  const auto environment = launched_rank(world_size, options);
  if (!environment) return run_threads(world_size, body, options);
  // All ranks of a job make the same worlds in the same order.
  static std::atomic<std::uint64_t> next_generation{0};
  run_rank(*environment, next_generation++, body, options,
           [](std::exception_ptr) {});
}

}  // namespace

const Backend kNccl{"nccl", check_nccl_ranks, run_nccl_ranks};

}  // namespace shardbook::internal
