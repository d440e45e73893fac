// ZeRO and FSDP: data parallelism in shards instead of copies.
//
//   ch03_zero_fsdp --world-size 4
//   ch03_zero_fsdp --world-size 4 --backward-prefetch post
//   ch03_zero_fsdp --world-size 8 --sharding-strategy hybrid_shard --shard-size 4
//   ch03_zero_fsdp --world-size 4 --strategy fsdp2 --param-dtype bf16
//   ch03_zero_fsdp --world-size 4 --strategy zero3
//   ch03_zero_fsdp --world-size 64 --backend sim --model gpt2-xl --batch 64
//
// Needed: 02_ddp. Next: 04_model_parallel.

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    zero_fsdp::StrategyOptions setup;
    CommandLine line("ch03_zero_fsdp", "ZeRO stages 1 to 3, and FSDP.");
    add_shared_options(line, options);
    zero_fsdp::add_options(line, setup);
    line.parse(argc, argv);
    check_options(options);
    zero_fsdp::check_given(setup, line.given());
    narrow(options, zero_fsdp::shortest_dtype(options.dtype, setup));
    refuse_image_models(options, kBatchNormDiffers);

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    chapter.fold_class = zero_fsdp::fold_class(options, setup);
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: one, over the whole world.
      DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));

      // 4. Build the same model from the same seed on every rank's host.
      // 5. Apply the strategy: move shards to the device, register hooks.
      zero_fsdp::ZeroFsdpStrategy strategy(options, setup, mesh.group("dp"));

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with the single-device run.
    chapter.reference = [](const Options& options) {
      return train_one_device(options);
    };

    // 8. Report loss, largest difference, bytes sent, memory, step time.
    return run_program(options, line, chapter);
  });
}
