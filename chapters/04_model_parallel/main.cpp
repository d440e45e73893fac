// Model parallelism: the first layers on one device, the others on another.
//
//   ch04_model_parallel
//   ch04_model_parallel --variant model_parallel
//   ch04_model_parallel --model resnet50 --batch 120 --image-size 128
//       --split-size 20 --backend sim
//
// Read before: 01_data_parallel. Read next: 05_gpipe.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "chapters/01_data_parallel/device_trace.h"
#include "chapters/04_model_parallel/bill.h"
#include "chapters/04_model_parallel/sweep.h"
#include "chapters/04_model_parallel/toy.h"
#include "chapters/04_model_parallel/trainer.h"
#include "chapters/common/report.h"
#include "chapters/common/worlds.h"

using namespace shardbook;
using model_parallel::Settings;
using model_parallel::Trainer;

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
    CommandLine line("ch04_model_parallel",
                     "Model parallelism: half of the layers on each device.");
    add_shared_options(line, options, {"threads", "sim"},
                       "one process works on both devices; see 05_gpipe for "
                       "ranks that are processes");
    line.add("--variant", &settings.variant, "devices, and how they take turns",
             model_parallel::kVariants);
    line.add("--split-size", &settings.split_size, "rows of a split", 1);
    std::string loss;
    line.add("--loss", &loss,
             "mse (against one-hot labels; of images, where not told "
             "otherwise) or cross_entropy");
    bool toy = false;
    line.add("--toy", &toy,
             "train the two-layer model of PyTorch's tutorial, and end");
    std::string sweep_sizes;
    std::int64_t repeats = 5;
    line.add("--sweep", &sweep_sizes,
             "also measure these split sizes, such as 1,3,5,8,10,12,20,40,60");
    line.add("--repeats", &repeats, "of each measurement of the sweep", 1);
    line.parse(argc, argv);
    check_options(options);
    std::vector<std::int64_t> sizes;
    if (!sweep_sizes.empty()) sizes = model_parallel::split_sizes(sweep_sizes);
    SB_CHECK(loss.empty() || loss == "mse" || loss == "cross_entropy",
             "--loss ", loss, ": give mse or cross_entropy");
    if (loss.empty()) {
      loss =
          ModelConfig::read(options.model).is_image() ? "mse" : "cross_entropy";
    }
    settings.loss = loss;
    if (settings.variant == "single") {
      // One device, and all of the batch, unless told otherwise
      settings = model_parallel::on_one_device(settings);
    }
    SB_CHECK(options.world_size == 2, "--world-size ", options.world_size,
             ": the model is cut once; give 2");
    if (toy) {
      SB_CHECK(options.backend == "threads" && options.steps >= 1,
               "--toy: shows numbers; give --backend threads and at least one "
               "of --steps");
      fmt::print("{}", model_parallel::toy_text(model_parallel::train_toy(
                           options, settings.split_size)));
      return 0;
    }
    const Options on_two = options;
    const int n = options.world_size = settings.num_devices();

    // 2. Start the ranks: one, which owns both devices; each has its cores.
    const auto cost = cost_model(options);
    const int cores = std::max(1, num_threads() / 2);
    std::vector<NamedTensor> trained;
    Report report = with_prediction(options, [&](const Options& options,
                                                 Report& report) {
      std::vector<Device> devices;
      for (int i = 0; i < n; ++i) {
        devices.push_back(options.backend == "sim"
                              ? Device::meta(i, options.device_memory_bytes)
                              : Device::cpu(i, options.device_memory_bytes));
      }
      RankContext context(devices[0], /*rank=*/0, cores);
      context.deterministic = options.deterministic;
      RankContext::Scope scope(context);
      std::optional<sim::ClockScope> clock;
      if (cost != nullptr) {
        clock.emplace(*cost, 0, n);
        for (int i = 1; i < n; ++i) clock->clock().add_device(devices[i], i);
      }

      // 3. Name the axes of the device mesh: none, the devices are a list.
      // 4. Build the model from the seed, each half where it will be.
      // 5. Apply the strategy: a queue per device, a copy between the halves.
      Trainer trainer(options, settings, devices, cores);
      data_parallel::DeviceTraces traces(devices);
      data_parallel::CopyLedger no_copies;
      data_parallel::CopyLedger& ledger = n > 1 ? *trainer.ledger() : no_copies;
      if (!options.trace.empty()) traces.watch(context, ledger);

      // 6. Train a few steps on the same data.
      const TrainingLog log = train(
          options, trainer.optimizer(), /*is_main=*/true,
          [&](std::int64_t step) { return trainer.step(trainer.batch(step)); });
      if (!options.trace.empty()) traces.write(options.trace);
      if (options.backend != "sim") {
        report.losses = log.losses;
        report.grad_norms = log.grad_norms;
      }
      report.wall_step_s = log.step_s;
      report.rank_threads = cores;

      const auto traffic =
          model_parallel::step_traffic(options, settings, trainer);
      const auto bills =
          model_parallel::memory_bills(options, settings, trainer);
      std::vector<sim::TimeSummary> times;
      for (std::size_t i = 0; i < devices.size(); ++i) {
        report.ranks.push_back(
            rank_report(traffic[i] * static_cast<double>(options.steps),
                        data_parallel::bytes_sent(ledger.records(devices[i])),
                        bills[i], devices[i].memory()));
        if (!clock) continue;
        times.push_back(clock->clock().devices()[i]->summary());
        report.timelines.push_back(clock->clock().devices()[i]->timeline());
      }
      if (clock) report.time = virtual_time(clock->clock(), times);
      save_results(options, trainer.whole_model(), trainer.data());
      trained = trainer.named_parameters();
    });

    // 7. Compare parameters with the single-device run, over the same splits.
    compare_with_reference(
        options, trained,
        [&](const Options& as) {
          return model_parallel::train_reference(as, settings);
        },
        report);

    // 8. Report loss, largest difference, bytes sent, peak memory, step time.
    show_timeline(options, report);
    std::string sweep_text;
    if (!sizes.empty()) {
      const auto sweep =
          model_parallel::run_sweep(on_two, settings, sizes, repeats);
      report.more.emplace_back("sweep", model_parallel::sweep_json(sweep));
      sweep_text = model_parallel::sweep_text(sweep);
    }
    const int status = print_report(options, line, report);
    if (options.format == "text") std::fputs(sweep_text.c_str(), stdout);
    return status;
  });
}
