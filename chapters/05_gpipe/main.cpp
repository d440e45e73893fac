// GPipe: split the layers over ranks and the batch into micro-batches.
//
//   ch05_gpipe --world-size 4 --micro-batches 8
//   ch05_gpipe --world-size 3 --partition 2,1,3 --recompute never
//   ch05_gpipe --world-size 4 --long-skips --backend gloo
//   ch05_gpipe --world-size 8 --backend sim --model gpt-175b --batch 64
//
// Needed: 00_single_device. Next: 06_1f1b.

#include <fmt/format.h>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    gpipe::StrategyOptions setup;
    bool print_schedule = false;
    CommandLine line("ch05_gpipe", "GPipe: micro-batches through stages.");
    add_shared_options(line, options);
    gpipe::add_options(line, setup);
    line.add("--print-schedule", &print_schedule, "draw the schedule and exit")
        .may_differ(may_differ::kOutput);
    line.parse(argc, argv);
    check_options(options);
    if (print_schedule) {
      fmt::print("{}", gpipe::figure(options, setup));
      return 0;
    }
    gpipe::check_strategy_options(options, setup);

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    chapter.fold_class = each_rank;  // stages differ
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: one, over the whole world.
      DeviceMesh mesh(world, Topology({"pp"}, {world.size()}));

      // 4. Build the same model from the same seed: each rank its layers.
      // 5. Apply the strategy: stages of layers, micro-batches of the batch.
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
