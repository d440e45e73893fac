// The worlds of comm_gpu_test: the GPUs of this machine, as many as there are
// for NCCL, and shared by threads.

#include "comm/launch.h"
#include "comm/nccl/nccl_library.h"
#include "core/internal/device_runtime.h"
#include "tests/comm/worlds.h"
#include "tests/support/on_ranks.h"

namespace shardbook::test {
namespace {

World world(const std::string& name, const std::string& backend) {
  return {name, [backend](int world_size, const RankBody& body) {
            LaunchOptions options;
            options.backend = backend;
            options.device = "cuda";
            return on_ranks(world_size, body, options);
          }};
}

std::string why_not(int num_gpus_needed) {
  if (!internal::why_no_cuda().empty()) return internal::why_no_cuda();
  const int there = internal::cuda_runtime().count();
  if (there >= num_gpus_needed) return std::string();
  return "needs " + std::to_string(num_gpus_needed) + " GPUs, " +
         std::to_string(there) + (there == 1 ? " is" : " are") + " visible";
}

}  // namespace

std::vector<World> conformance_worlds() {
  World threads = world("ThreadsOnGpu", "threads");
  threads.why_not = [](int) { return why_not(1); };
  World nccl = world("Nccl", "nccl");
  nccl.why_not = [](int world_size) {
    const std::string reason = why_not(world_size);
    return reason.empty() ? internal::why_no_nccl() : reason;
  };
  return {threads, nccl};
}

}  // namespace shardbook::test
