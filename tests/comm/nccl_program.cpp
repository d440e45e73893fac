// One rank of backend nccl in a process of its own, or their launcher:
//
//   nccl_program WORLD_SIZE SCENARIO
//
//   all    every operation, in the world and in its parts; prints "right"
//   launch the same, from a process that starts all ranks
//   dies   rank 1 kills itself before it meets the others
//   kill   rank 1 kills itself while rank 0 waits for the device
//
// SHARDBOOK_TIMEOUT_MS is the timeout.

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "comm/processes.h"
#include "core/check.h"
#include "core/context.h"
#include "core/tensor.h"

namespace shardbook {
namespace {

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

void run_scenario(ProcessGroup& world, const std::string& scenario) {
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
  LaunchOptions options;
  options.backend = "nccl";
  options.timeout = std::chrono::seconds(60);
  if (const char* timeout = std::getenv("SHARDBOOK_TIMEOUT_MS")) {
    options.timeout = std::chrono::milliseconds(std::atoi(timeout));
  }
  const int world_size = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::string scenario = argc > 2 ? argv[2] : "all";
  if (scenario == "launch" || scenario == "dies") {
    if (const auto status = launch_processes(world_size, options)) {
      return *status;
    }
  }
  const auto rank = rank_environment();
  if (scenario == "dies" && rank && rank->rank == 1) raise(SIGKILL);
  run_ranks(
      world_size, [&](ProcessGroup& world) { run_scenario(world, scenario); },
      options);
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
