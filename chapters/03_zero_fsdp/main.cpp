// ZeRO and FSDP: data parallelism whose ranks share what they would all hold.
//
//   ch03_zero_fsdp --world-size 4
//   ch03_zero_fsdp --world-size 4 --strategy fsdp --backward-prefetch post
//   ch03_zero_fsdp --world-size 4 --strategy fsdp2 --param-dtype bf16
//   ch03_zero_fsdp --world-size 8 --strategy fsdp --sharding-strategy
//     hybrid_shard --shard-size 4
//   ch03_zero_fsdp --world-size 64 --backend sim --model gpt2-xl --batch 64
//
// Read before: 02_ddp. Read next: 04_model_parallel.

#include "chapters/03_zero_fsdp/trainer.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

using namespace shardbook;

namespace {

void add_options(CommandLine& line, zero_fsdp::TrainerOptions& how) {
  line.add("--strategy", &how.strategy, "what is sharded, and how",
           {"zero1", "zero2", "zero3", "fsdp", "fsdp2"});
  line.add("--accumulate", &how.accumulate, "micro-batches per step", 1);
  line.add("--recompute", &how.recompute,
           "each block's activations once more in backward");
  line.add("--cpu-offload", &how.cpu_offload,
           "shards and optimizer on the host (zero2: optimizer only)");
  // ZeRO
  line.add("--reduce-bucket-size", &how.zero.reduce_bucket_size,
           "zero1, zero2: elements of gradients that travel together", 1);
  line.add("--allgather-bucket-size", &how.zero.allgather_bucket_size,
           "zero1, zero2: elements that are gathered together after a step", 1);
  line.add("--overlap-comm", &how.zero.overlap_comm,
           "zero1 to zero3: gradients travel while backward runs");
  line.add("--reduce-scatter", &how.zero.reduce_scatter,
           "zero1, zero2, no-: all-reduce, and keep the own part");
  line.add("--round-robin-gradients", &how.zero.round_robin_gradients,
           "zero1, zero2: neighbouring gradients to different owners");
  line.add("--persistence-threshold", &how.zero.persistence_threshold,
           "zero3: parameters of so many elements stay gathered; -1: ten times "
           "the model's width",
           -1);
  line.add("--prefetch-bucket-size", &how.zero.prefetch_bucket_size,
           "zero3: elements gathered ahead of their use; -1: a block", -1);
  // FSDP
  line.add("--sharding-strategy", &how.sharding_strategy, "fsdp: what is freed",
           {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"});
  line.add("--shard-size", &how.fsdp.shard_size,
           "hybrid_shard: ranks that hold one copy together", 1);
  line.add("--wrap", &how.wrap, "fsdp: what becomes a unit",
           {"transformer", "size", "none"});
  line.add("--min-num-params", &how.min_num_params,
           "--wrap size: elements of a unit", 1);
  line.add("--backward-prefetch", &how.backward_prefetch,
           "fsdp: gather the next unit before or after this one's backward",
           {"pre", "post", "none"});
  line.add("--forward-prefetch", &how.fsdp.forward_prefetch,
           "fsdp: gather the next unit before this one's forward");
  line.add("--limit-all-gathers", &how.fsdp.limit_all_gathers,
           "fsdp: at most two gathered units ahead");
  line.add("--param-dtype", &how.param_dtype,
           "fsdp: what computes and is gathered", {"f32", "bf16", "f16"});
  line.add("--reduce-dtype", &how.reduce_dtype,
           "fsdp: what gradients travel in", {"f32", "bf16", "f16"});
  line.add("--no-sync", &how.no_sync,
           "fsdp: only the last micro-batch reduces");
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "03_zero_fsdp";
    zero_fsdp::TrainerOptions how;
    CommandLine line("ch03_zero_fsdp", "ZeRO stages 1 to 3, and FSDP.");
    add_shared_options(line, options);
    add_options(line, how);
    line.parse(argc, argv);
    check_options(options);
    zero_fsdp::check_given(how, line.given());
    narrow(options, zero_fsdp::shortest_dtype(options.dtype, how));
    refuse_image_models(options, kBatchNormDiffers);

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    chapter.fold_class = zero_fsdp::fold_class(options, how);
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: one, over the whole world.
      DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));

      // 4. Build the same model from the same seed on every rank's host.
      // 5. Apply the strategy: move shards to the device, register hooks.
      zero_fsdp::Trainer strategy(options, how, mesh.group("dp"));

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with the single-device run.
    chapter.reference = [](const Options& as) { return train_one_device(as); };

    // 8. Report loss, largest difference, bytes sent, peak memory, step time.
    return run_program(options, line, chapter);
  });
}
