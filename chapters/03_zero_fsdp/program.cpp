// ZeRO and FSDP: data parallelism in shards instead of copies.
//
//   ch03_zero_fsdp --world-size 4
//   ch03_zero_fsdp --world-size 4 --backward-prefetch post
//   ch03_zero_fsdp --world-size 8 --sharding-strategy hybrid_shard --shard-size 4
//   ch03_zero_fsdp --world-size 4 --strategy fsdp2 --param-dtype bf16
//   ch03_zero_fsdp --world-size 4 --strategy zero3
//   ch03_zero_fsdp --world-size 64 --backend sim --model gpt2-xl --batch 64
//
// Needed: 02_ddp. Next: 04_model_parallel.

#include "chapters/03_zero_fsdp/program.h"

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::zero_fsdp {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch03_zero_fsdp", "ZeRO stages 1 to 3, and FSDP.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  check_given(setup, line.given());
  narrow(options, shortest_dtype(options.dtype, setup));
  refuse_image_models(options, kBatchNormDiffers);

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = fold_class(options, setup);
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Name the axes of the device mesh: one, over the whole world.
    DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));

    // 4. Build the same model from the same seed on every rank's host.
    // 5. Apply the strategy: move shards to the device, register hooks.
    ZeroFsdpStrategy strategy(options, setup, mesh.group("dp"));

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

}  // namespace shardbook::zero_fsdp
