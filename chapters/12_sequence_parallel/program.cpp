// Sequence and context parallelism: cut the tokens of every sample over ranks.
//
//   ch12_sequence_parallel --world-size 4 --kind ring --layout zigzag
//   ch12_sequence_parallel --world-size 4 --kind ulysses
//   ch12_sequence_parallel --world-size 2 --kind megatron
//   ch12_sequence_parallel --world-size 64 --backend sim --model gpt2 --seq 65536
//
// Needed: 07_tensor_parallel. Next: 13_moe.

#include "chapters/12_sequence_parallel/program.h"

#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/common/run/training.h"
#include "comm/device_mesh.h"

namespace shardbook::sequence_parallel {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch12_sequence_parallel",
                "Ring attention, ring self-attention, Ulysses, and Megatron's "
                "sequence parallelism.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  check_micro_batches(options.batch, setup.micro_batches);
  refuse_image_models(options, "images have no sequence of tokens to cut");

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = fold_class(setup);
  chapter.rank = [&setup](const Options& options, ProcessGroup& world,
                          Run& run) {
    // 3. Name the axes of the device mesh: one, over the whole world.
    DeviceMesh mesh(world, Topology({"cp"}, {world.size()}));

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: layers that take this rank's tokens.
    const auto strategy = make_strategy(options, setup, mesh.group("cp"));

    // 6. Train a few steps on the same data.
    run.train(options, *strategy);
  };

  // 7. Compare parameters with the single-device run.
  chapter.reference = [&setup](const Options& options) {
    return train_one_device(options, setup.micro_batches);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::sequence_parallel
