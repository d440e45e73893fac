// Tensor parallelism: every matrix of a block is cut, by columns and by rows.
//
//   ch07_tensor_parallel --world-size 4
//   ch07_tensor_parallel --world-size 2 --backend gloo --dropout 0.1
//   ch07_tensor_parallel --world-size 4 --dropout 0.1 --rng megatron
//   ch07_tensor_parallel --world-size 8 --backend sim --model gpt-13b --batch 8
//
// Needed: 00_single_device. Next: 08_tensor_parallel_2d.

#include "chapters/07_tensor_parallel/program.h"

#include "chapters/07_tensor_parallel/parallel_state.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/common/run/training.h"

namespace shardbook::tensor_parallel {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch07_tensor_parallel",
                "Tensor parallelism: columns, rows, vocabulary.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  check_micro_batches(options.batch, setup.micro_batches);
  // Skip the comparison: one device draws other masks
  if (!draws_as_one_device(options, setup)) options.check = false;

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Make the groups of Megatron-LM: one, over the whole world.
    const auto groups =
        initialize_model_parallel(world, /*t=*/world.size(), /*p=*/1);

    // 4. Build this rank's columns and rows of the same model.
    // 5. Apply the strategy: the layers communicate by f and g.
    TensorParallelStrategy strategy(options, setup, groups->tensor());

    // 6. Train a few steps; every rank reads the same samples.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&setup](const Options& options) {
    return train_one_device(options, setup.micro_batches);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::tensor_parallel
