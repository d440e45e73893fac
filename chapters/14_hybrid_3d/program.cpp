// 3D parallelism: replicas of pipelines of sharded layers, on one device mesh.
//
//   ch14_hybrid_3d --world-size 8 --tp 2 --pp 2
//   ch14_hybrid_3d --world-size 8 --tp 2 --pp 2 --zero-stage 1
//   ch14_hybrid_3d --world-size 8 --tp 2 --cp 2 --pp 2 --sequence-parallel
//   ch14_hybrid_3d --world-size 8 --tp 2 --pp 2 --ep 2 --num-experts 8
//   ch14_hybrid_3d --print-combinations
//   ch14_hybrid_3d --world-size 64 --backend sim --model gpt-175b --dtype bf16
//     --tp 8 --pp 8 --batch 64 --micro-batches 64 --seq 2048
//
// Needed: 03_zero_fsdp, 06_1f1b, 07_tensor_parallel. Next: 15_engine.

#include "chapters/14_hybrid_3d/program.h"

#include <cstdio>

#include "chapters/07_tensor_parallel/parallel_state.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"

namespace shardbook::hybrid {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<HybridOptions>();
  bool& prints_combinations = line.own<bool>(false);
  line.describe("ch14_hybrid_3d",
                "Data, tensor, context, expert and pipeline parallelism "
                "together, with ZeRO.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.add({"--print-combinations", may_differ::kOutput}, &prints_combinations,
           "print which axes and stages of ZeRO go together, and exit");
  line.parse();
  if (prints_combinations) {
    return instead_of_training([] {
      std::fputs(combinations_text().c_str(), stdout);
      return 0;
    });
  }
  check_options(options);
  check_legal(options, setup);

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = fold_class(options, setup);
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Make the groups of Megatron-LM on the axes of the device mesh.
    tensor_parallel::ModelParallel groups(world, topology_of(setup));

    // 4. Build this rank's parts of this rank's stage of the same model.
    // 5. Apply the strategy: a pipeline, then the sums over all axes.
    const auto strategy = make_strategy(options, setup, groups.mesh());

    // 6. Train a few steps; replicas read different samples.
    run.train(options, *strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&setup](const Options& options) {
    return reference_run(options, setup);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::hybrid
