// DDP: a replica on every rank; gradients are averaged while backward runs.
//
//   ch02_ddp --world-size 4
//   ch02_ddp --world-size 2 --backend gloo --accumulate 3
//   ch02_ddp --world-size 2 --bucket-mb 0.1 --trace ddp.json
//   ch02_ddp --world-size 1024 --backend sim --model gpt-175b --batch 1024
//
// Read before: 01_data_parallel. Read next: 03_zero_fsdp.

#include "chapters/02_ddp/trainer.h"
#include "chapters/common/report.h"
#include "chapters/common/trace.h"
#include "chapters/common/worlds.h"
#include "comm/processes.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "02_ddp";
    ddp::TrainerOptions how;
    CommandLine line("ch02_ddp", "DistributedDataParallel: Reducer, buckets, "
                                 "overlap.");
    add_shared_options(line, options);
    line.add("--bucket-mb", &how.ddp.bucket_cap_mb,
             "MiB after which a bucket is full", 1e-6, 1e6);
    line.add("--first-bucket-mb", &how.ddp.first_bucket_mb,
             "the same for the first bucket", 1e-6, 1e6);
    line.add("--find-unused-parameters", &how.ddp.find_unused_parameters,
             "look for parameters that a forward does not use");
    line.add("--gradient-as-bucket-view", &how.ddp.gradient_as_bucket_view,
             "gradients lie in the buckets");
    line.add("--static-graph", &how.ddp.static_graph,
             "every step uses the same parameters equally often");
    line.add("--broadcast-buffers", &how.ddp.broadcast_buffers,
             "rank 0's buffers before each forward");
    line.add("--accumulate", &how.accumulate,
             "micro-batches per step; only the last one communicates", 1);
    line.add("--comm-hook", &how.comm_hook, "what travels in place of buckets",
             {"none", "bf16"});
    line.parse(argc, argv);
    check_options(options);
    if (how.comm_hook == "bf16") narrow(options, DType::kBF16);
    refuse_image_models(options,
                        "batch norm sees its rank's images only, so that no "
                        "run on several ranks equals one device; see "
                        "04_model_parallel and 00_single_device");

    // 2. Start the ranks: threads of this process, processes, or fibers.
    if (options.backend == "gloo") {
      if (const auto status =
              launch_processes(options.world_size, launch_options(options))) {
        return *status;
      }
    }
    std::vector<NamedTensor> trained;
    const ChapterBody body = [&](const Options& options, ProcessGroup& world,
                                 Report& report) {
      const bool is_main = world.rank() == 0;
      TraceScope trace(options, world);

      // 3. Name the axes of the device mesh: one, "dp", is the whole world.
      // 4. Build the same model from the same seed on every rank.
      // 5. Apply the strategy: wrap the model, register hooks, make buckets.
      ddp::Trainer trainer(options, how, world);

      // 6. Train a few steps on the same data.
      const TrainingLog log =
          train(options, trainer.optimizer(), is_main,
                [&](std::int64_t step) { return trainer.step(step); });

      finish_rank(options, world, log, trainer.predicted_bytes(),
                  trainer.bill(), report);
      trace.write();
      if (!is_main) return;
      save_results(options, trainer.model(), trainer.data());
      trained = trainer.model().model->named_parameters();
    };
    Report report = run_chapter(options, body);
    if (report.ranks.empty()) return 0;  // the first rank reports

    // 7. Compare parameters with the single-device run.
    compare_with_reference(
        options, trained,
        [](const Options& as) { return train_one_device(as); }, report);

    // 8. Report loss, largest difference, bytes sent, peak memory, step time.
    show_timeline(options, report);
    return print_report(options, line, report);
  });
}
