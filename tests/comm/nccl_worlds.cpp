// The worlds of nccl_test: NCCL's stand-in on emulated GPUs, and threads whose
// tensors lie on emulated GPUs, one each and one for all.

#include <cstdlib>
#include <utility>

#include "comm/launch.h"
#include "tests/comm/worlds.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/support/on_ranks.h"

namespace shardbook::test {
namespace {

constexpr int kGpus = 8;

// Before anything asks for a GPU.
const bool kIsSetUp = [] {
  setenv("SHARDBOOK_CUDA_LIBRARY", SHARDBOOK_EMULATED_LIBRARY, 1);
  setenv("SHARDBOOK_NCCL_LIBRARY", SHARDBOOK_NCCL_STAND_IN, 1);
  emulator::set_device_count(kGpus);
  return true;
}();

World world(const std::string& name, const std::string& backend, int num_gpus,
            std::uint64_t seed, std::vector<int> sizes) {
  World result;
  result.name = name;
  result.sizes = std::move(sizes);
  result.run = [=](int world_size, const RankBody& body) {
    emulator::set_device_count(num_gpus);
    emulator::set_seed(seed);
    LaunchOptions options;
    options.backend = backend;
    options.device = "cuda";
    auto results = on_ranks(world_size, body, options);
    emulator::set_device_count(kGpus);
    return results;
  };
  return result;
}

}  // namespace

std::vector<World> conformance_worlds() {
  return {world("Nccl", "nccl", kGpus, 0, {1, 2, 3, 4, 8}),
          world("NcclInAnotherOrder", "nccl", kGpus, 3, {2}),
          world("ThreadsOnGpus", "threads", kGpus, 0, {3}),
          world("ThreadsOnOneGpu", "threads", 1, 0, {1, 2, 4})};
}

}  // namespace shardbook::test
