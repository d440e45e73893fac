// One device: the yardstick that every other chapter is compared with.
//
//   ch00_single_device
//   ch00_single_device --micro-batches 4 --recompute
//   ch00_single_device --dtype bf16 --master-weights
//
// Needed: nothing. Next: 01_data_parallel.

#include "chapters/00_single_device/program.h"

#include "chapters/00_single_device/single_device.h"
#include "core/check.h"

namespace shardbook::single_device {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<SingleDeviceOptions>();
  line.describe("ch00_single_device", "One device: the yardstick.");
  add_shared_options(line, options, {"threads", "sim"});
  add_options(line, setup);
  line.parse();
  check_options(options);
  if (setup.cuda_graphs) check_cuda_graphs(options);
  SB_CHECK(options.world_size == 1, "--world-size ", options.world_size,
           ": this chapter has one device; see 01_data_parallel");

  // 2. Start the ranks: there is one.
  ChapterRun chapter;
  chapter.rank = [&setup](const Options& options, ProcessGroup&, Run& run) {
    // 3. Name the axes of the device mesh: none.
    // 4. Build the model from the seed.
    // 5. Apply the strategy: pieces, recomputation, precision.
    SingleDevice strategy(options, setup);

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare with the plain run: the whole batch at once, no recomputation.
  // Batch norm sees pieces: a ResNet's plain run keeps them.
  chapter.reference = [&setup](const Options& options) {
    const bool in_pieces = model_config(options).is_image();
    return train_plain(options, in_pieces ? setup.num_micro_batches : 1);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::single_device
