// Tensor parallelism in 2D: matrices in blocks on a square of ranks.
//
//   ch08_tensor_parallel_2d --world-size 4
//   ch08_tensor_parallel_2d --world-size 9 --backend sim --model gpt2-xl
//
// Needed: 07_tensor_parallel. Next: 09_tensor_parallel_2p5d.

#include "chapters/08_tensor_parallel_2d/program.h"

#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::summa {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& passes = line.own<Passes>();
  line.describe("ch08_tensor_parallel_2d",
                "Tensor parallelism in 2D: SUMMA, Optimus.");
  add_shared_options(line, options);
  add_passes(line, passes);
  line.parse();
  check_options(options);
  const int q = side_of(options.world_size, 1, "--world-size");

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.rank = [&passes, q](const Options& options, ProcessGroup& world,
                              Run& run) {
    // 3. Name the axes of the device mesh: a square of rows and columns.
    DeviceMesh mesh(world, square(q));

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: each rank draws its blocks, layers multiply them.
    SummaStrategy strategy(options, grid_of(mesh), world, passes);

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&passes](const Options& options) {
    return train_one_device(options, passes.micro_batches);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::summa
