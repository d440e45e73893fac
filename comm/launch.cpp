#include "comm/launch.h"

#include "comm/gloo/gloo_group.h"
#include "comm/internal/rank_device.h"
#include "comm/nccl/nccl_group.h"
#include "comm/processes/rendezvous.h"
#include "comm/processes/socket.h"
#include "comm/threads/thread_group.h"
#include "core/check.h"

namespace shardbook {

void check_launch(int world_size, const LaunchOptions& options) {
  const std::string& backend = options.backend;
  SB_CHECK(world_size >= 1 && world_size <= 4096, "world size ", world_size,
           ": give 1 to 4096 ranks");
  SB_CHECK(options.timeout.count() > 0, "timeout ", options.timeout.count(),
           " ms: give more than 0");
  SB_CHECK(backend == "threads" || backend == "gloo" || backend == "nccl",
           "backend '", backend, "' is unknown; give threads, gloo or nccl");
  const std::string& device = options.device;
  SB_CHECK(device.empty() || device == "cpu" || device == "cuda", "--device ",
           device, ": give cpu or cuda");
  SB_CHECK(backend != "gloo" || device != "cuda",
           "--backend gloo: it moves tensors of the CPU only; use --backend "
           "nccl or --backend threads with --device cuda");
  SB_CHECK(backend != "nccl" || device != "cpu",
           "--backend nccl: it moves tensors of GPUs only; give --device cuda, "
           "or use --backend threads or gloo");
  if (backend == "gloo") internal::check_gloo();
  if (backend != "threads") {
    if (!options.rendezvous.empty()) {
      internal::check_rendezvous("--rendezvous " + options.rendezvous,
                                 options.rendezvous);
    }
    internal::launched_rank(world_size, options);
    if (!options.network_interface.empty()) {
      internal::interface_host(options.network_interface);
    }
  }
  if (backend == "nccl") {
    internal::check_nccl_ranks(world_size, options);
  } else if (device == "cuda") {
    internal::check_gpus();
  }
}

void run_ranks(int world_size, const std::function<void(ProcessGroup&)>& body,
               const LaunchOptions& options) {
  check_launch(world_size, options);
  if (options.backend == "threads") {
    internal::run_thread_ranks(world_size, body, options);
  } else if (options.backend == "gloo") {
    internal::run_gloo_ranks(world_size, body, options);
  } else {
    internal::run_nccl_ranks(world_size, body, options);
  }
}

}  // namespace shardbook
