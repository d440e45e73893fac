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

#include "chapters/15_engine/cifar_strategy.h"
#include "chapters/common/run/program.h"

namespace shardbook::moe {
namespace {

Program program(CommandLine& line) {
  // 1. Read the options: the script's, and some of those of all programs.
  auto& options = line.own<Options>();
  auto& cifar = line.own<CifarOptions>();
  line.describe("cifar_moe", "A convolutional net with experts.");
  add_cifar_options(line, options, cifar);
  line.parse();
  check_options(options);
  const auto& data =
      line.own<CifarData>(open_cifar10(options.data, options.seed));
  const Topology grid =
      expert_topology(cifar_groups(cifar, options.world_size));

  // 2. Start the ranks: threads of this process, or processes.
  ChapterRun chapter;
  chapter.fold_class = each_rank;
  chapter.rank = [&cifar, &data, grid](const Options& options,
                                       ProcessGroup& world, Run& run) {
    // 3. Name the axes of the device mesh: experts and their copies.
    DeviceMesh mesh(world, grid);

    // 4. Build the same net from the same seed on every rank.
    // 5. Apply the strategy: the engine, around a net with experts over EP.
    CifarStrategy strategy(options, cifar, data, mesh);

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with one device that routes the same groups.
  chapter.reference = [&cifar, &data](const Options& options) {
    return train_cifar_reference(options, cifar, data);
  };

  // 8. The caller reports loss, accuracies, bytes, memory.
  return {options, chapter};
}

}  // namespace
}  // namespace shardbook::moe

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::moe::program, argc, argv);
}
