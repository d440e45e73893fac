#include "comm/internal/rank_device.h"

#include <algorithm>
#include <cstdint>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

#include "core/check.h"
#include "core/internal/device_runtime.h"

namespace shardbook::internal {
namespace {

// CUDA's contexts, libraries and kernels need the rest.
constexpr double kUsableShare = 0.9;

}  // namespace

int available_cores() {
#ifdef __linux__
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) {
    return std::max(CPU_COUNT(&mask), 1);
  }
#endif
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

std::string current_reason() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

void check_gpus() {
  const std::string problem = why_no_cuda();
  SB_CHECK(problem.empty(), "--device ", problem);  // "cuda: no GPU ..."
}

Device rank_device(int rank, int local_rank, int num_local, bool on_cuda,
                   const LaunchOptions& options) {
  std::int64_t capacity = options.device_memory_bytes;
  if (!on_cuda) return Device::cpu(rank, capacity);
  DeviceRuntime& runtime = cuda_runtime();
  const int num_gpus = runtime.count();
  const int gpu = local_rank % num_gpus;
  const int num_sharers = (num_local - gpu + num_gpus - 1) / num_gpus;
  if (capacity == 0 && num_sharers > 1) {
    const auto usable =
        static_cast<double>(runtime.properties(gpu).memory_bytes);
    capacity = static_cast<std::int64_t>(usable * kUsableShare / num_sharers);
  }
  return Device::cuda(gpu, capacity);
}

}  // namespace shardbook::internal
