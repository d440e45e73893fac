// Model parallelism: the first layers on one device, the others on another.
//
//   ch04_model_parallel
//   ch04_model_parallel --variant model_parallel
//   ch04_model_parallel --model resnet50 --batch 120 --image-size 128
//       --split-size 20 --backend sim
//
// Needed: 00_single_device. Next: 05_gpipe.

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/common/run/program.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options = model_parallel::default_options();
    model_parallel::Settings settings;
    model_parallel::Extras extras;
    CommandLine line("ch04_model_parallel",
                     "Model parallelism: half of the layers on each device.");
    add_shared_options(line, options, {"threads", "sim"},
                       "one process works on both devices; see 05_gpipe for "
                       "ranks that are processes");
    model_parallel::add_options(line, settings, extras);
    line.parse(argc, argv);
    check_options(options);
    model_parallel::check_settings(options, settings);

    // 2. Start the ranks: one owns both devices, each with half of the cores.
    const Options on_two = options;
    options.world_size = settings.num_devices();
    ChapterRun chapter;
    chapter.cores_shared_by = 2;
    chapter.devices = [&](const Options& options,
                          const std::vector<Device>& devices, Run& run) {
      // 3. Name the axes of the device mesh: none; the devices are a list.
      // 4. Build the model from the seed, each half on its device.
      // 5. Apply the strategy: a queue per device, a copy between the halves.
      model_parallel::ModelParallelStrategy strategy(options, settings, devices,
                                                     num_threads());

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with the single-device run, over the same splits.
    chapter.reference = [&](const Options& options) {
      return model_parallel::train_reference(options, settings);
    };

    // 8. Report loss, largest difference, bytes sent, memory, step time.
    chapter.add_to_report = [&](Report& report) {
      model_parallel::add_sweep(on_two, settings, extras, report);
    };
    return run_program(options, line, chapter);
  });
}
