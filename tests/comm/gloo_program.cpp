// A program that runs as several processes, for launch tests:
//
//   gloo_program WORLD_SIZE SCENARIO
//
//   sum    prints the sum of the rank numbers, twice in two worlds
//   throw  rank 1 throws        kill  rank 1 kills itself
//   wait   prints "ready" and computes until a signal comes
//   chain  every rank waits for a message of the next one; the last one, or
//          the one that SHARDBOOK_STOPS names, stops itself instead
//   reduce prints "ready" and calls all_reduce until that fails
//   end    rank 1 stops itself after its last call
//
// SHARDBOOK_TIMEOUT_MS is the timeout; SHARDBOOK_AGREED is the value of
// "--agreed", which all ranks must share.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "comm/processes.h"
#include "core/check.h"
#include "core/tensor.h"

namespace shardbook {
namespace {

void run_scenario(ProcessGroup& world, const std::string& scenario) {
  world.barrier();
  if (scenario == "throw") SB_CHECK(world.rank() != 1, "as asked");
  if (scenario == "kill" && world.rank() == 1) raise(SIGKILL);
  if (scenario == "wait") {
    std::printf("ready\n");
    std::fflush(stdout);
    for (;;) pause();
  }
  if (scenario == "chain") {
    const char* stops = std::getenv("SHARDBOOK_STOPS");
    const int last = world.size() - 1;
    if (world.rank() == (stops != nullptr ? std::atoi(stops) : last)) {
      raise(SIGSTOP);
    }
    const int next = (world.rank() + 1) % world.size();
    // A message that no receiver waits for must not make the rank look guilty
    world.send(Tensor::zeros({7}), next, /*tag=*/1);
    world.recv(Tensor::zeros({10}), next).wait();
  }
  if (scenario == "reduce") {
    std::printf("ready\n");
    std::fflush(stdout);
    for (;;) world.all_reduce(Tensor::zeros({1 << 20})).wait();
  }
  const Tensor x = Tensor::full({3}, world.rank());
  world.all_reduce(x).wait();
  // Every rank prints; the launcher shows only the first one's output.
  std::printf("sum %g of %d\n", x.to_vector<double>()[2], world.size());
}

int run(int argc, char** argv) {
  LaunchOptions options;
  options.backend = "gloo";
  options.timeout = std::chrono::seconds(20);
  if (const char* timeout = std::getenv("SHARDBOOK_TIMEOUT_MS")) {
    options.timeout = std::chrono::milliseconds(std::atoi(timeout));
  }
  if (const char* agreed = std::getenv("SHARDBOOK_AGREED")) {
    options.agreed = {{"--agreed", agreed}};
  }
  const int world_size = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::string scenario = argc > 2 ? argv[2] : "sum";
  if (const auto status = launch_processes(world_size, options)) return *status;
  int rank = 0;
  for (int i = 0; i < 2; ++i) {
    run_ranks(
        world_size,
        [&](ProcessGroup& world) {
          rank = world.rank();
          run_scenario(world, scenario);
        },
        options);
  }
  if (scenario == "end" && rank == 1) raise(SIGSTOP);
  return 0;
}

}  // namespace
}  // namespace shardbook

int main(int argc, char** argv) {
  try {
    return shardbook::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
