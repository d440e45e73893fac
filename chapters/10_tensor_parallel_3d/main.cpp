// Tensor parallelism in 3D: every matrix spread once over a cube of ranks.
//
//   ch10_tensor_parallel_3d --world-size 8
//   ch10_tensor_parallel_3d --world-size 8 --keep-gathered false
//   ch10_tensor_parallel_3d --world-size 64 --backend sim --model gpt2-xl
//   ch10_tensor_parallel_3d --compare --picture comparison.svg
//
// Read before: 09_tensor_parallel_2p5d. Read next: 11_dtensor.

#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "core/check.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "10_tensor_parallel_3d";
    bool keep_gathered = true;
    std::string compared = "none", picture;
    Passes passes;
    CommandLine line("ch10_tensor_parallel_3d",
                     "Tensor parallelism in 3D: the cube.");
    add_shared_options(line, options);
    add_passes(line, passes);
    line.add("--keep-gathered", &keep_gathered,
             "keep gathered operands for backward");
    line.add_mode("--compare", &compared,
                  "print what one layer costs in 1D, 2D, 2.5D and 3D, and "
                  "train nothing",
                  {"block", "mlp", "none"});
    line.add("--picture", &picture,
             "with --compare: a file for the plot of the bytes sent, as SVG");
    line.parse(argc, argv);
    check_options(options);
    if (compared != "none") {
      return cube::show_comparison(options, compared, picture);
    }
    SB_CHECK(picture.empty(), "--picture ", picture,
             ": it shows what --compare counts; give both");
    const int l = cube::side_of(options.world_size, "--world-size");

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: the three of a cube.
      DeviceMesh mesh(world, cube::cube_of(l));

      // 4. Build the same model from the same seed on every rank.
      // 5. Apply the strategy: each rank draws its parts, layers gather them.
      cube::Cube place = cube::cube_on(mesh);
      place.keep_gathered = keep_gathered;
      cube::CubeStrategy strategy(options, place, world, passes);

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with the single-device run.
    chapter.reference = [&](const Options& options) {
      return train_one_device(options, passes.micro_batches);
    };

    // 8. Report loss, largest difference, bytes sent, memory, step time.
    return run_program(options, line, chapter);
  });
}
