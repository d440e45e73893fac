// DataParallel: one process cuts each batch over devices, a thread per device.
//
//   ch01_data_parallel --world-size 2
//   ch01_data_parallel --world-size 4 --batch 5
//   ch01_data_parallel --world-size 3 --dropout 0.1 --dtype f64
//
// Needed: 00_single_device. Next: 02_ddp.

#include "chapters/01_data_parallel/program.h"

#include "chapters/01_data_parallel/data_parallel_strategy.h"

namespace shardbook::data_parallel {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  line.describe("ch01_data_parallel",
                "DataParallel: one process, a thread per device.");
  add_shared_options(line, options, {"threads", "sim"},
                     "DataParallel is one process with a thread per device; "
                     "see 02_ddp for ranks that are processes");
  line.parse();
  check_options(options);
  refuse_image_models(options, kBatchNormDiffers);

  // 2. Start the ranks: one, which owns all devices and divides the cores.
  ChapterRun chapter;
  chapter.devices = [](const Options& options,
                       const std::vector<Device>& devices, Run& run) {
    // 3. Name the axes of the device mesh: none, the devices are a list.
    // 4. Build the model from the seed, once, on the main device.
    // 5. Apply the strategy: replicas come and go with every forward.
    DataParallelStrategy strategy(options, devices);

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

}  // namespace shardbook::data_parallel
