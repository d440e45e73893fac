// Mixture of experts: many MLPs in a layer, and each token visits few of them.
//
//   ch13_moe --world-size 4                                       E
//   ch13_moe --world-size 4 --ep 2                                E + D
//   ch13_moe --world-size 4 --ep 2 --zero-stage 2                 E + Z
//   ch13_moe --world-size 8 --ep 2 --tp 2                         E + D + M
//   ch13_moe --world-size 4 --zero-stage 2 --tp 2 --cpu-offload   E + Z-Off + M
//   ch13_moe --world-size 64 --backend sim --model gpt2 --num-experts 64
//
// Needed: 03_zero_fsdp, 07_tensor_parallel. Next: 14_hybrid_3d.

#include "chapters/13_moe/program.h"

#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/run/training.h"
#include "comm/device_mesh.h"

namespace shardbook::moe {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>();
  auto& setup = line.own<StrategyOptions>();
  line.describe("ch13_moe", "Mixture of experts, expert parallelism.");
  add_shared_options(line, options);
  add_options(line, setup);
  line.parse();
  check_options(options);
  refuse_image_models(options, "experts stand in the place of a GPT's MLPs");
  take_experts(line, options, setup.moe);
  check_strategy_options(options, setup);
  const Topology grid = expert_topology(group_sizes(options, setup));

  // 2. Start the ranks: threads of this process, processes, or fibers.
  ChapterRun chapter;
  chapter.fold_class = fold_class(options, setup);
  chapter.rank = [&setup, grid](const Options& options, ProcessGroup& world,
                                Run& run) {
    // 3. Name the axes of the device mesh: experts, their copies, TP.
    DeviceMesh mesh(world, grid);

    // 4. Build the same model from the same seed on every rank.
    // 5. Apply the strategy: experts over EP, dense parameters over DP.
    MoeStrategy strategy(options, setup, mesh);

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with one device that routes the same groups; without
  // capacity, with one device.
  chapter.reference = [&setup](const Options& options) {
    return model_config(options).is_llama() ? train_one_device(options)
                                            : train_reference(options, setup);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  return {options, chapter};
}

}  // namespace shardbook::moe
