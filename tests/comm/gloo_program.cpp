// A program that runs as several processes, for launch tests:
//
//   gloo_program WORLD_SIZE SCENARIO
//
//   sum    prints the sum of the rank numbers, twice in two worlds
//   throw  rank 1 throws        kill  rank 1 kills itself
//   wait   prints "ready" and computes until a signal comes

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
  const Tensor x = Tensor::full({3}, world.rank());
  world.all_reduce(x).wait();
  // Every rank prints; the launcher shows the first one's.
  std::printf("sum %g of %d\n", x.to_vector<double>()[2], world.size());
}

int run(int argc, char** argv) {
  LaunchOptions options;
  options.backend = "gloo";
  options.timeout = std::chrono::seconds(20);
  if (const char* timeout = std::getenv("SHARDBOOK_TIMEOUT_MS")) {
    options.timeout = std::chrono::milliseconds(std::atoi(timeout));
  }
  const int world_size = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::string scenario = argc > 2 ? argv[2] : "sum";
  if (const auto status = launch_processes(world_size, options)) return *status;
  for (int i = 0; i < 2; ++i) {
    run_ranks(
        world_size, [&](ProcessGroup& world) { run_scenario(world, scenario); },
        options);
  }
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
