// 1F1B and its family: one engine, and schedules as data.
//
//   ch06_1f1b --world-size 4
//   ch06_1f1b --world-size 4 --schedule zb-h1 --micro-batches 12
//   ch06_1f1b --world-size 2 --schedule interleaved --chunks 2
//   ch06_1f1b --world-size 4 --schedule pipedream --no-stash
//   ch06_1f1b --world-size 4 --schedule zb-auto --write-schedule mine.json
//   ch06_1f1b --world-size 4 --schedule mine.json
//   ch06_1f1b --world-size 8 --backend sim --model gpt-175b --dtype bf16
//     --batch 64 --micro-batches 64 --seq 2048
//
// Needed: 05_gpipe. Next: 07_tensor_parallel.

#include "chapters/06_1f1b/program.h"

#include "chapters/06_1f1b/pipeline_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::pipeline {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch06_1f1b",
                "PipeDream, 1F1B, interleaved, zero bubble, DualPipe.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  const Plan plan = make_plan(options, setup);
  if (setup.only_shows()) {
    return instead_of_training([plan, &setup] {
      show_schedule(plan, setup);
      return 0;
    });
  }

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = each_rank;  // stages differ
  chapter.rank = [&setup, plan](Options options, ProcessGroup& world,
                                Run& run) {
    const Plan here =  // without flushes, a plan is the whole run's
        options.is_prediction ? plan.on_shapes(&options) : plan;

    // 3. Name the axes of the device mesh: one, over the whole world.
    DeviceMesh mesh(world, Topology({"pp"}, {world.size()}));

    // 4. Build the same model from the same seed: only this rank's stages.
    // 5. Apply the strategy: an engine that runs this rank's list.
    PipelineStrategy strategy(options, setup, here, mesh.group("pp"));

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&setup, plan](const Options& options) {
    return reference_run(options, setup, plan);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  chapter.add_to_report = [plan](Report& report) {
    if (plan.is_asynchronous()) {
      report.more.emplace_back("other_training", plan.other_training());
    }
  };
  return {options, chapter};
}

}  // namespace shardbook::pipeline
