// DDP: a replica on every rank; gradients are averaged while backward runs.
//
//   ch02_ddp --world-size 4
//   ch02_ddp --world-size 2 --backend gloo --micro-batches 3
//   ch02_ddp --world-size 2 --bucket-mb 0.1 --trace ddp.json
//   ch02_ddp --world-size 1024 --backend sim --model gpt-175b --batch 1024
//
// Read before: 01_data_parallel. Read next: 03_zero_fsdp.

#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

using namespace shardbook;

namespace {

void add_options(CommandLine& line, ddp::StrategyOptions& setup) {
  line.add("--bucket-mb", &setup.ddp.bucket_cap_mb,
           "MiB after which a bucket is full", 1e-6, 1e6);
  line.add("--first-bucket-mb", &setup.ddp.first_bucket_mb,
           "the same for the first bucket", 1e-6, 1e6);
  line.add("--find-unused-parameters", &setup.ddp.find_unused_parameters,
           "look for parameters that a forward does not use");
  line.add("--gradient-as-bucket-view", &setup.ddp.gradient_as_bucket_view,
           "gradients lie in the buckets");
  line.add("--static-graph", &setup.ddp.static_graph,
           "every step uses the same parameters equally often");
  line.add("--micro-batches", &setup.micro_batches,
           "micro-batches per step; only the last one communicates", 1);
  line.add("--comm-hook", &setup.comm_hook, "what travels in place of buckets",
           {"none", "bf16"});
  line.refuse("--accumulate", "this option is called --micro-batches");
  line.refuse("--broadcast-buffers", "the models of this chapter have none");
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "02_ddp";
    ddp::StrategyOptions setup;
    CommandLine line("ch02_ddp",
                     "DistributedDataParallel: Reducer, buckets, "
                     "overlap.");
    add_shared_options(line, options);
    add_options(line, setup);
    line.parse(argc, argv);
    check_options(options);
    if (setup.comm_hook == "bf16") narrow(options, DType::kBF16);
    refuse_image_models(options, kBatchNormDiffers);

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: one, over the whole world.
      DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));

      // 4. Build the same model from the same seed on every rank.
      // 5. Apply the strategy: wrap the model, register hooks, make buckets.
      ddp::DdpStrategy strategy(options, setup, mesh.group("dp"));

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
