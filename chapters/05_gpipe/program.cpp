// GPipe: split the layers over ranks and the batch into micro-batches.
//
//   ch05_gpipe --world-size 4 --micro-batches 8
//   ch05_gpipe --world-size 3 --partition 2,1,3 --recompute never
//   ch05_gpipe --world-size 4 --long-skips --backend gloo
//   ch05_gpipe --world-size 8 --backend sim --model gpt-175b --batch 64
//
// Needed: 00_single_device. Next: 06_1f1b.

#include "chapters/05_gpipe/program.h"

#include <fmt/format.h>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::gpipe {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  bool& print_schedule = line.own<bool>(false);
  line.describe("ch05_gpipe", "GPipe: micro-batches through stages.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.add({"--print-schedule", may_differ::kOutput}, &print_schedule,
           "draw the schedule and exit");
  line.parse();
  check_options(options);
  if (print_schedule) {
    return instead_of_training([&options, &setup] {
      fmt::print("{}", figure(options, setup));
      return 0;
    });
  }
  check_strategy_options(options, setup);

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = each_rank;  // stages differ
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Name the axes of the device mesh: one, over the whole world.
    DeviceMesh mesh(world, Topology({"pp"}, {world.size()}));

    // 4. Build the same model from the same seed: each rank its layers.
    // 5. Apply the strategy: stages of layers, micro-batches of the batch.
    GpipeStrategy strategy(options, setup, mesh.group("pp"));

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&setup](const Options& options) {
    return train_one_device_in_reverse(options, setup);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::gpipe
