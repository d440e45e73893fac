// One device: the yardstick that every other chapter is compared with.
//
//   ch00_single_device
//   ch00_single_device --micro-batches 4 --recompute
//   ch00_single_device --dtype bf16 --master-weights
//
// Read next: 01_data_parallel.

#include "chapters/00_single_device/single_device.h"
#include "chapters/common/report.h"
#include "chapters/common/trace.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "00_single_device";
    single_device::SingleDeviceOptions how;
    CommandLine line("ch00_single_device", "One device: the yardstick.");
    add_shared_options(line, options, {"threads"});
    line.add("--micro-batches", &how.num_micro_batches,
             "pieces of a batch, one after another", 1);
    line.add("--recompute", &how.recompute,
             "keep only the blocks' inputs; compute the rest again");
    line.add("--master-weights", &how.master_weights,
             "f32 copies of 16-bit weights");
    line.parse(argc, argv);
    check_options(options);
    SB_CHECK(options.world_size == 1, "--world-size ", options.world_size,
             ": this chapter has one device; see 01_data_parallel");

    int status = 0;
    // 2. Start the ranks: there is one.
    run_ranks(1, [&](ProcessGroup& world) {
      RankContext& context = RankContext::current();
      Trace trace(world.rank());
      if (!options.trace.empty()) context.add_observer(&trace);

      // 3. Name the axes of the device mesh: none.
      // 4. Build the model from the seed.
      // 5. Apply the strategy: pieces, recomputation, precision.
      single_device::SingleDevice device(options, how);

      // 6. Train a few steps on the same data.
      const TrainingLog log =
          train(options, device.optimizer(), /*is_main=*/true,
                [&](std::int64_t step) { return device.step(step); });
      const MemoryStats memory = context.device.memory();
      context.remove_observer(&trace);
      save_results(options, device.model(), device.data());
      if (!options.trace.empty()) {
        write_chrome_trace(options.trace, {trace.to_json()});
      }

      // 7. Compare with the plain run: the whole batch at once, nothing twice.
      Report report;
      report.chapter = options.chapter;
      report.losses = log.losses;
      report.wall_step_s = log.step_s;
      if (options.check) {
        report.parity = compare_with_one_device(
            options, log.losses, device.model().model->named_parameters(),
            train_one_device(options));
      }

      // 8. Report loss, largest difference, bytes sent, peak memory, time.
      report.ranks = {rank_report(0, wire_bytes(world.records()),
                                  device.bill(), memory)};
      status = print_report(options, line, report);
    }, launch_options(options));
    return status;
  });
}
