// Model parallelism: the first layers on one device, the others on another.
//
//   ch04_model_parallel
//   ch04_model_parallel --variant model_parallel
//   ch04_model_parallel --model resnet50 --batch 120 --image-size 128
//       --split-size 20 --backend sim
//
// Read before: 01_data_parallel. Read next: 05_gpipe.

#include <fmt/format.h>

#include "chapters/04_model_parallel/sweep.h"
#include "chapters/04_model_parallel/toy.h"
#include "chapters/04_model_parallel/trainer.h"
#include "chapters/common/run/program.h"

using namespace shardbook;
using model_parallel::Settings;

namespace {

/// What the program does, beside Settings.
struct Extras {
  bool toy = false;
  std::string sweep;  ///< split sizes; empty: none
  std::int64_t repeats = 5;
};

void add_options(CommandLine& line, Settings& settings, Extras& extras) {
  line.add("--variant", &settings.variant, "devices, and how they take turns",
           model_parallel::kVariants);
  line.add("--split-size", &settings.split_size, "rows of a split", 1);
  line.add("--loss", &settings.loss,
           "mse (against one-hot labels; of images, where not told otherwise) "
           "or cross_entropy");
  line.add("--toy", &extras.toy,
           "train the two-layer model of PyTorch's tutorial, and end");
  line.add("--sweep", &extras.sweep,
           "also measure these split sizes, such as 1,3,5,8,10,12,20,40,60");
  line.add("--repeats", &extras.repeats, "of each measurement of the sweep", 1);
}

void check_settings(const Options& options, Settings& settings) {
  SB_CHECK(options.world_size == 2, "--world-size ", options.world_size,
           ": the model is cut once; give 2");
  std::string& loss = settings.loss;
  SB_CHECK(loss.empty() || loss == "mse" || loss == "cross_entropy", "--loss ",
           loss, ": give mse or cross_entropy");
  if (loss.empty()) {
    loss =
        ModelConfig::read(options.model).is_image() ? "mse" : "cross_entropy";
  }
  // One device, and all of the batch, unless told otherwise
  if (settings.variant == "single") {
    settings = model_parallel::on_one_device(settings);
  }
}

int show_toy(const Options& options, const Settings& settings) {
  SB_CHECK(options.backend == "threads" && options.steps >= 1,
           "--toy: shows numbers; give --backend threads and at least one of "
           "--steps");
  fmt::print("{}", model_parallel::toy_text(model_parallel::train_toy(
                       options, settings.split_size)));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "04_model_parallel";
    options.world_size = 2;
    options.model = "resnet18";
    options.optimizer = "sgd";
    options.cluster = "kaggle-t4x2";
    options.steps = 6;
    Settings settings;
    settings.loss.clear();
    Extras extras;
    CommandLine line("ch04_model_parallel",
                     "Model parallelism: half of the layers on each device.");
    add_shared_options(line, options, {"threads", "sim"},
                       "one process works on both devices; see 05_gpipe for "
                       "ranks that are processes");
    add_options(line, settings, extras);
    line.parse(argc, argv);
    check_options(options);
    std::vector<std::int64_t> sizes;
    if (!extras.sweep.empty()) sizes = model_parallel::split_sizes(extras.sweep);
    check_settings(options, settings);
    if (extras.toy) return show_toy(options, settings);

    // 2. Start the ranks: one, which owns both devices; each has its cores.
    const Options on_two = options;
    options.world_size = settings.num_devices();
    ChapterRun chapter;
    chapter.cores_shared_by = 2;  // a device alone has no more than one of two
    chapter.devices = [&](const Options& options,
                          const std::vector<Device>& devices, Run& run) {
      // 3. Name the axes of the device mesh: none, the devices are a list.
      // 4. Build the model from the seed, each half where it will be.
      // 5. Apply the strategy: a queue per device, a copy between the halves.
      model_parallel::Trainer strategy(options, settings, devices,
                                       num_threads());

      // 6. Train a few steps on the same data.
      run.train(options, strategy);
    };

    // 7. Compare parameters with the single-device run, over the same splits.
    chapter.reference = [&](const Options& as) {
      return model_parallel::train_reference(as, settings);
    };

    // 8. Report loss, largest difference, bytes sent, peak memory, step time.
    chapter.add_to_report = [&](Report& report) {
      if (sizes.empty()) return;
      const auto sweep =
          model_parallel::run_sweep(on_two, settings, sizes, extras.repeats);
      report.more.emplace_back("sweep", model_parallel::sweep_json(sweep));
      report.appendix = model_parallel::sweep_text(sweep);
    };
    return run_program(options, line, chapter);
  });
}
