// The DDP work of pytorch_peer.

#include <memory>

#include "bench/pytorch_peer.h"
#include "chapters/02_ddp/ddp.h"

namespace shardbook::bench {

TimedWork ddp_work(const PeerOptions& options, ProcessGroup& world) {
  auto step = std::make_shared<TrainingStep>(options, world.rank());
  ddp::DdpOptions ddp_options;
  ddp_options.gradient_as_bucket_view = true;
  auto wrapped = std::make_shared<ddp::DistributedDataParallel>(
      *step->model, world, ddp_options);
  return {"gradient_as_bucket_view", [step, wrapped, &world] {
            step->run([&](const Tensor& ids) { return (*wrapped)(ids); });
            world.clear_records();
          }};
}

}  // namespace shardbook::bench
