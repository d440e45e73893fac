// Model parallelism: the first layers on one device, the others on another.
//
//   ch04_model_parallel
//   ch04_model_parallel --variant model_parallel
//   ch04_model_parallel --model resnet50 --batch 120 --image-size 128
//       --split-size 20 --backend sim
//
// Needed: 00_single_device. Next: 05_gpipe.

#include "chapters/04_model_parallel/program.h"

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/04_model_parallel/split_sweep.h"

namespace shardbook::model_parallel {

Program program(CommandLine& line) {
  // 1. Read the options: the shared ones, then this chapter's own.
  auto& options = line.own<Options>(default_options());
  auto& settings = line.own<Settings>();
  auto& extras = line.own<Extras>();
  line.describe("ch04_model_parallel",
                "Model parallelism: half of the layers on each device.");
  add_shared_options(line, options, {"threads", "sim"},
                     "one process works on both devices; see 05_gpipe for "
                     "ranks that are processes");
  add_options(line, settings, extras);
  line.parse();
  check_options(options);
  check_settings(options, settings);

  // 2. Start the ranks: one owns both devices, each with half of the cores.
  const Options on_two = options;
  options.world_size = settings.num_devices();
  ChapterRun chapter;
  chapter.cores_shared_by = 2;
  chapter.devices = [&settings](const Options& options,
                                const std::vector<Device>& devices, Run& run) {
    // 3. Name the axes of the device mesh: none; the devices are a list.
    // 4. Build the model from the seed, each half on its device.
    // 5. Apply the strategy: a queue per device, a copy between the halves.
    ModelParallelStrategy strategy(options, settings, devices, num_threads());

    // 6. Train a few steps on the same data.
    run.train(options, strategy);
  };

  // 7. Compare parameters with the single-device run, over the same splits.
  chapter.reference = [&settings](const Options& options) {
    return train_reference(options, settings);
  };

  // 8. The caller reports loss, largest difference, bytes, memory, time.
  chapter.add_to_report = [on_two, &settings, &extras](Report& report) {
    add_sweep(on_two, settings, extras, report);
  };
  return {options, chapter};
}

}  // namespace shardbook::model_parallel
