// DeepSpeed's example on CIFAR-10: a convolutional net with layers of experts,
// trained by the engine of chapter 15 with the config of the example's script.
//
//   cifar_moe --world-size 4 --moe --num-experts 2,4 --mlp-type residual
//   cifar_moe --world-size 2 --moe --num-experts 4 --stage 2 --cpu-offload
//   cifar_moe --data cifar-10-batches-bin --steps 500
//
// Without --data, images are made up in the same format.
//
// Needed: 13_moe, 15_engine.

#include "chapters/13_moe/cifar_strategy.h"
#include "chapters/common/run/program.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the script's, and some of those of all programs.
    Options options;
    moe::CifarOptions cifar;
    CommandLine line("cifar_moe", "A convolutional net with experts.");
    moe::add_cifar_options(line, options, cifar);
    line.parse(argc, argv);
    check_options(options);
    const moe::CifarData data = moe::open_cifar10(options.data, options.seed);
    const Topology grid =
        moe::expert_topology(moe::cifar_groups(cifar, options.world_size));

    // 2. Start the ranks: threads of this process, or processes.
    ChapterRun chapter;
    chapter.fold_class = each_rank;
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: experts and their copies.
      DeviceMesh mesh(world, grid);

      // 4. Build the same net from the same seed on every rank.
      // 5. Apply the strategy: the engine, around a net with experts over EP.
      moe::CifarStrategy strategy(options, cifar, data, mesh);

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with one device that routes the same groups.
    chapter.reference = [&](const Options& options) {
      return moe::train_cifar_reference(options, cifar, data);
    };

    // 8. Report loss, accuracies, largest difference, bytes sent, memory.
    return run_program(options, line, chapter);
  });
}
