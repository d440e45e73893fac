// A program that runs as several processes, for launch tests:
//
//   rank_program BACKEND WORLD_SIZE SCENARIO
//
// With backend gloo, which starts the ranks where no launcher has:
//
//   sum    prints the sum of the rank numbers, twice in two worlds
//   throw  rank 1 throws        kill  rank 1 kills itself
//   wait   prints "ready" and computes until a signal comes
//   chain  every rank waits for a message of the next one; the last one, or
//          the one that SHARDBOOK_STOPS names, stops itself instead
//   reduce prints "ready" and calls all_reduce until that fails
//   end    rank 1 stops itself after its last call
//
// With backend nccl, one rank that a launcher has started:
//
//   all    every operation, in the world and in its parts; prints "right"
//   launch the same, from a process that starts all ranks
//   dies   the same, but rank 1 kills itself before it meets the others
//   kill   rank 1 kills itself while rank 0 waits for the device
//
// SHARDBOOK_TIMEOUT_MS is the timeout; SHARDBOOK_AGREED is the value of
// "--agreed", which all ranks must share.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/processes.h"
#include "core/check.h"
#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {
namespace {

void run_gloo(ProcessGroup& world, const std::string& scenario) {
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
    (void)world.send(Tensor::zeros({7}), next, /*tag=*/1);
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

void expect(const Tensor& tensor, const std::vector<double>& values,
            const char* call) {
  SB_CHECK(tensor.to_vector<double>() == values, call, " is wrong");
}

// Rank r has r + 1 in each element.
void call_all(ProcessGroup& world) {
  const int n = world.size();
  const double mine = world.rank() + 1, sum = n * (n + 1) / 2.0;
  std::vector<double> each;
  for (int r = 0; r < n; ++r) each.push_back(r + 1);
  const Tensor one = Tensor::full({1}, mine);
  const Tensor all = Tensor::zeros({n});

  const Tensor x = Tensor::full({1}, mine);
  world.all_reduce(x).wait();
  expect(x, {sum}, "all_reduce");
  world.all_gather(all, one).wait();
  expect(all, each, "all_gather");
  world.reduce_scatter(x, all).wait();
  expect(x, {n * mine}, "reduce_scatter");
  world.broadcast(x, n - 1).wait();
  expect(x, {1.0 * n * n}, "broadcast");
  world.scatter(x, all, 0).wait();
  expect(x, {mine}, "scatter");
  world.reduce(x, 0).wait();
  if (world.rank() == 0) expect(x, {sum}, "reduce");
  const Tensor gathered = Tensor::zeros({n});
  world.gather(gathered, one, n - 1).wait();
  if (world.rank() == n - 1) expect(gathered, each, "gather");
  world.all_to_all(gathered, Tensor::full({n}, mine)).wait();
  expect(gathered, each, "all_to_all");
  if (n > 1) {
    Work sent = world.send(Tensor::full({50000}, mine), (world.rank() + 1) % n);
    const Tensor y = Tensor::zeros({50000});
    const int left = (world.rank() + n - 1) % n;
    world.recv(y, left).wait();
    sent.wait();
    expect(y, std::vector<double>(50000, left + 1), "recv");
  }
  world.barrier();
}

void run_nccl(ProcessGroup& world, const std::string& scenario) {
  if (scenario == "kill") {
    const Tensor x = Tensor::zeros({1});
    world.all_reduce(x).wait();
    world.barrier();
    if (world.rank() == 1) raise(SIGKILL);
    world.all_reduce(x).wait();
    x.item();  // the host waits for the device, which waits for rank 1
    world.barrier();
  }
  call_all(world);
  call_all(*world.split(0, -world.rank(), "reversed"));
  std::printf("right on %s\n", RankContext::current().device.name().c_str());
}

int run(int argc, char** argv) {
  SB_CHECK(argc == 4, "rank_program BACKEND WORLD_SIZE SCENARIO");
  LaunchOptions options;
  options.backend = argv[1];
  const bool is_gloo = options.backend == "gloo";
  options.timeout = std::chrono::seconds(is_gloo ? 20 : 60);
  if (const char* timeout = std::getenv("SHARDBOOK_TIMEOUT_MS")) {
    options.timeout = std::chrono::milliseconds(std::atoi(timeout));
  }
  if (const char* agreed = std::getenv("SHARDBOOK_AGREED")) {
    options.agreed = {{"--agreed", agreed}};
  }
  const int world_size = std::atoi(argv[2]);
  const std::string scenario = argv[3];
  if (is_gloo || scenario == "launch" || scenario == "dies") {
    if (const auto status = launch_processes(world_size, options)) {
      return *status;
    }
  }
  const auto started = rank_environment();
  if (scenario == "dies" && started && started->rank == 1) raise(SIGKILL);
  int rank = 0;
  for (int i = 0; i < (is_gloo ? 2 : 1); ++i) {
    run_ranks(
        world_size,
        [&](ProcessGroup& world) {
          rank = world.rank();
          (is_gloo ? run_gloo : run_nccl)(world, scenario);
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
