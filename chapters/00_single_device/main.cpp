// One device: the yardstick that every other chapter is compared with.
//
//   ch00_single_device
//   ch00_single_device --micro-batches 4 --recompute
//   ch00_single_device --dtype bf16 --master-weights
//
// Needed: nothing. Next: 01_data_parallel.

#include "chapters/00_single_device/single_device.h"
#include "chapters/common/run/program.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    single_device::SingleDeviceOptions setup;
    CommandLine line("ch00_single_device", "One device: the yardstick.");
    add_shared_options(line, options, {"threads", "sim"});
    single_device::add_options(line, setup);
    line.parse(argc, argv);
    check_options(options);
    if (setup.cuda_graphs) check_cuda_graphs(options);
    SB_CHECK(options.world_size == 1, "--world-size ", options.world_size,
             ": this chapter has one device; see 01_data_parallel");

    // 2. Start the ranks: there is one.
    ChapterRun chapter;
    chapter.rank = [&](const Options& options, ProcessGroup&, Run& run) {
      // 3. Name the axes of the device mesh: none.
      // 4. Build the model from the seed.
      // 5. Apply the strategy: pieces, recomputation, precision.
      single_device::SingleDevice strategy(options, setup);

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare with the plain run: the whole batch at once, no recomputation.
    // Batch norm sees pieces: a ResNet's plain run keeps them.
    chapter.reference = [&](const Options& options) {
      const bool in_pieces = model_config(options).is_image();
      return single_device::train_plain(
          options, in_pieces ? setup.num_micro_batches : 1);
    };

    // 8. Report loss, largest difference, bytes sent, memory, time.
    return run_program(options, line, chapter);
  });
}
