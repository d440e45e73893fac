// Tensor parallelism in 3D: every matrix spread once over a cube of ranks.
//
//   ch10_tensor_parallel_3d --world-size 8
//   ch10_tensor_parallel_3d --world-size 8 --keep-gathered false
//   ch10_tensor_parallel_3d --world-size 64 --backend sim --model gpt2-xl
//   ch10_tensor_parallel_3d --compare --picture comparison.svg
//
// Needed: 08_tensor_parallel_2d. Next: 11_dtensor.

#include "chapters/10_tensor_parallel_3d/program.h"

#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "comm/device_mesh.h"

namespace shardbook::cube {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<ProgramOptions>();
  line.describe("ch10_tensor_parallel_3d",
                "Tensor parallelism in 3D: the cube.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  if (setup.compared != "none") {
    return instead_of_training([&options, &setup] {
      return show_comparison(options, setup.compared, setup.picture);
    });
  }
  const int l = side_of(options.world_size, "--world-size");

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.rank = [&setup, l](const Options& options, ProcessGroup& world,
                             Run& run) {
    // 3. Name the axes of the device mesh: the three of a cube.
    DeviceMesh mesh(world, cube_of(l));

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: each rank draws its parts, layers gather them.
    Cube place = cube_on(mesh);
    place.keep_gathered = setup.keep_gathered;
    CubeStrategy strategy(options, place, world, setup.passes);

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&setup](const Options& options) {
    return train_one_device(options, setup.passes.micro_batches);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::cube
