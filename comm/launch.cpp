#include "comm/launch.h"

#include "comm/internal/backends.h"
#include "core/check.h"

namespace shardbook {
namespace {

using internal::Backend;

const Backend& backend_of(const LaunchOptions& options) {
  for (const Backend* backend :
       {&internal::kThreads, &internal::kGloo, &internal::kNccl}) {
    if (options.backend == backend->name) return *backend;
  }
  SB_FAIL("backend '", options.backend,
          "' is unknown; give threads, gloo or nccl");
}

}  // namespace

void check_launch(int world_size, const LaunchOptions& options) {
  SB_CHECK(world_size >= 1 && world_size <= 4096, "world size ", world_size,
           ": give 1 to 4096 ranks");
  SB_CHECK(options.timeout.count() > 0, "timeout ", options.timeout.count(),
           " ms: give more than 0");
  const Backend& backend = backend_of(options);
  SB_CHECK(!options.rendezvous_sends || options.backend == "threads",
           "--rendezvous-sends: --backend ", options.backend,
           " decides itself which messages it buffers; give --backend threads");
  const std::string& device = options.device;
  SB_CHECK(device.empty() || device == "cpu" || device == "cuda", "--device ",
           device, ": give cpu or cuda");
  backend.check(world_size, options);
}

void run_ranks(int world_size, const std::function<void(ProcessGroup&)>& body,
               const LaunchOptions& options) {
  check_launch(world_size, options);
  backend_of(options).run(world_size, body, options);
}

}  // namespace shardbook
