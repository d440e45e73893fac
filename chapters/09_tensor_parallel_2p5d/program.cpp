// Tensor parallelism in 2.5D: squares of ranks, one above the other.
//
//   ch09_tensor_parallel_2p5d --world-size 8 --depth 2
//   ch09_tensor_parallel_2p5d --world-size 4 --depth 1
//
// Needed: 08_tensor_parallel_2d. Next: 10_tensor_parallel_3d.

#include "chapters/09_tensor_parallel_2p5d/program.h"

#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "comm/device_mesh.h"

namespace shardbook::tesseract {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  int& depth = line.own<int>(2);
  auto& passes = line.own<Passes>();
  line.describe("ch09_tensor_parallel_2p5d",
                "Tensor parallelism in 2.5D: Tesseract.");
  add_shared_options(line, options);
  add_passes(line, passes);
  line.add({"--depth", may_differ::kRanks}, &depth,
           "squares of ranks, one above the other", 1);
  line.parse();
  if (options.world_size == 1) depth = 1;
  check_options(options);
  const int q = summa::side_of(options.world_size, depth, "--world-size");

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.rank = [&passes, &depth, q](const Options& options,
                                      ProcessGroup& world, Run& run) {
    // 3. Name the axes of the device mesh: squares of rows and columns.
    DeviceMesh mesh(world, squares(q, depth));

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: the 2D layers on a grid that has a depth.
    summa::SummaStrategy strategy(options, summa::grid_of(mesh), world, passes);

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

}  // namespace shardbook::tesseract
