// DDP: a replica on every rank; gradients are averaged while backward runs.
//
//   ch02_ddp --world-size 4
//   ch02_ddp --world-size 2 --backend gloo --micro-batches 3
//   ch02_ddp --world-size 2 --bucket-mb 0.1 --trace ddp.json
//   ch02_ddp --world-size 1024 --backend sim --model gpt-175b --batch 1024
//
// Needed: 00_single_device. Next: 03_zero_fsdp.

#include "chapters/02_ddp/program.h"

#include "chapters/02_ddp/ddp_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::ddp {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch02_ddp",
                "DistributedDataParallel: Reducer, buckets, overlap.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  if (setup.comm_hook == "bf16") narrow(options, DType::kBF16);
  refuse_image_models(options, kBatchNormDiffers);

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Name the axes of the device mesh: one, over the whole world.
    DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: wrap the model, register hooks, make buckets.
    DdpStrategy strategy(options, setup, mesh.group("dp"));

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [](const Options& options) {
    return train_one_device(options);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::ddp
