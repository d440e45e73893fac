// DTensor: one layout language for data, sharded-data and tensor parallelism.
//
//   ch11_dtensor --world-size 4
//   ch11_dtensor --world-size 4 --mesh 2x2
//   ch11_dtensor --world-size 4 --mesh 2x2 --data-parallel ddp
//   ch11_dtensor --world-size 2 --picture layout.svg
//   ch11_dtensor --world-size 8 --backend sim --mesh 8 --model gpt2-medium
//
// Needed: 03_zero_fsdp, 07_tensor_parallel. Next: 12_sequence_parallel.

#include "chapters/11_dtensor/program.h"

#include "chapters/11_dtensor/dtensor_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::dtensor {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch11_dtensor",
                "DeviceMesh, placements, redistribute, parallelize_module.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  topology_of(setup, options.world_size);

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = fold_class(options, setup);
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Name the axes of the device mesh: dp and tp.
    DeviceMesh mesh(world, topology_of(setup, world.size()));

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: cut parameters, add the hooks of the plan.
    DTensorStrategy strategy(options, setup, mesh);

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

}  // namespace shardbook::dtensor
