// GPipe: split the layers over ranks and the batch into micro-batches.
//
//   ch05_gpipe --world-size 4 --micro-batches 8
//   ch05_gpipe --world-size 3 --partition 2,1,3 --recompute never
//   ch05_gpipe --world-size 4 --long-skips --backend gloo
//   ch05_gpipe --world-size 8 --backend sim --model gpt-175b --batch 64
//
// Read before: 04_model_parallel. Read next: 06_1f1b.

#include <fmt/format.h>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/common/pipeline/partition.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "05_gpipe";
    gpipe::StrategyOptions setup;
    bool print_schedule = false;
    CommandLine line("ch05_gpipe", "GPipe: micro-batches through stages.");
    add_shared_options(line, options);
    line.add("--micro-batches", &setup.micro_batches,
             "pieces of a batch, each ceil(batch / n) samples", 1);
    line.add("--partition", &setup.partition, kPartitionHelp);
    add_recompute(line, setup.recompute, setup.early_recompute);
    line.add("--long-skips", &setup.long_skips,
             "connect block i with block L-1-i, as U-Nets do");
    line.add("--print-schedule", &print_schedule, "draw the schedule and exit");
    line.refuse("--balance", "this option is called --partition");
    line.parse(argc, argv);
    check_options(options);
    SB_CHECK(
        !setup.long_skips || (options.save.empty() && options.load.empty()),
        "--long-skips: a saved model does not record them; leave out "
        "--save and --load");
    if (print_schedule) {
      fmt::print("{}", gpipe::figure(options, setup));
      return 0;
    }
    gpipe::check_trainer_options(options, setup);

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    // Stages differ, so every rank is simulated
    chapter.fold_class = [](int rank) { return rank; };
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: one, over the whole world.
      DeviceMesh mesh(world, Topology({"pp"}, {world.size()}));

      // 4. Build the same model from the same seed: each rank builds its
      // layers.
      // 5. Apply the strategy: cut the layers into stages, the batch into
      // micro-batches.
      gpipe::GpipeStrategy strategy(options, setup, mesh.group("pp"));

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with the single-device run.
    chapter.reference = [&](const Options& options) {
      return gpipe::train_one_device_in_reverse(options, setup);
    };

    // 8. Report loss, largest difference, bytes sent, memory, step time.
    return run_program(options, line, chapter);
  });
}
