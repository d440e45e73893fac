// DataParallel: one process cuts each batch over devices, a thread per device.
//
//   ch01_data_parallel --world-size 2
//   ch01_data_parallel --world-size 4 --batch 5
//   ch01_data_parallel --world-size 3 --dropout 0.1 --dtype f64
//
// Read before: 00_single_device. Read next: 02_ddp.

#include <algorithm>
#include <optional>
#include <thread>

#include "chapters/01_data_parallel/bill.h"
#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/01_data_parallel/device_trace.h"
#include "chapters/01_data_parallel/train_step.h"
#include "chapters/common/report.h"
#include "chapters/common/worlds.h"

using namespace shardbook;
using data_parallel::DataParallel;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "01_data_parallel";
    CommandLine line("ch01_data_parallel",
                     "DataParallel: one process, a thread per device.");
    add_shared_options(line, options, {"threads", "sim"},
                       "DataParallel is one process with a thread per device; "
                       "see 02_ddp for ranks that are processes");
    line.parse(argc, argv);
    check_options(options);
    refuse_image_models(options,
                        "batch norm sees its rank's images only, so that no "
                        "run on several ranks equals one device; see "
                        "04_model_parallel and 00_single_device");

    // 2. Start the ranks: one, which owns all devices and divides the cores.
    const int n = options.world_size;
    const auto cost = cost_model(options);
    std::vector<NamedTensor> trained;
    Report report = with_prediction(options, [&](const Options& options,
                                                 Report& report) {
      std::vector<Device> devices;
      for (int i = 0; i < n; ++i) {
        devices.push_back(
            options.backend == "sim"
                ? Device::meta(i, options.device_memory_bytes)
                : Device::cpu(i, options.device_memory_bytes));
      }
      RankContext context(devices[0], /*rank=*/0,
                          std::max(1, num_threads() / n));
      context.deterministic = options.deterministic;
      RankContext::Scope scope(context);
      std::optional<sim::ClockScope> clock;
      if (cost != nullptr) {
        clock.emplace(*cost, 0, n);
        for (int i = 1; i < n; ++i) clock->clock().add_device(devices[i], i);
      }

      // 3. Name the axes of the device mesh: none, the devices are a list.
      // 4. Build the model from the seed, once, on the main device.
      LoadedModel loaded = build_model(options);
      const Dataset data = Dataset::open(options.data, options.seq,
                                         loaded.config.vocab_size,
                                         options.seed);
      const auto optimizer =
          make_optimizer(options.optimizer, loaded.model->parameters(),
                         options.optimizer_options);

      // 5. Apply the strategy: replicas come and go with every forward.
      DataParallel model(*loaded.model, devices);
      data_parallel::DeviceTraces traces(devices);
      if (!options.trace.empty()) traces.watch(context, *model.ledger());

      // 6. Train a few steps on the same data.
      const TrainingLog log =
          train(options, *optimizer, /*is_main=*/true, [&](std::int64_t step) {
            return data_parallel::train_step(options, model, *optimizer, data,
                                             step);
          });
      if (!options.trace.empty()) traces.write(options.trace);
      if (options.backend != "sim") {
        report.losses = log.losses;
        report.grad_norms = log.grad_norms;
      }
      report.wall_step_s = log.step_s;
      report.rank_threads = num_threads();

      const auto traffic = data_parallel::step_traffic(options, loaded.config);
      const auto bills =
          data_parallel::memory_bills(options, loaded.config, *loaded.model);
      std::vector<sim::TimeSummary> times;
      for (std::size_t i = 0; i < devices.size(); ++i) {
        report.ranks.push_back(rank_report(
            traffic[i].total() * static_cast<double>(options.steps),
            data_parallel::bytes_sent(model.ledger()->records(devices[i])),
            bills[i], devices[i].memory()));
        if (!clock) continue;
        times.push_back(clock->clock().devices()[i]->summary());
        report.timelines.push_back(clock->clock().devices()[i]->timeline());
      }
      if (clock) report.time = virtual_time(clock->clock(), times);
      save_results(options, loaded, data);
      trained = loaded.model->named_parameters();
    });

    // 7. Compare parameters with the single-device run.
    compare_with_reference(
        options, trained,
        [](const Options& as) { return train_one_device(as); }, report);

    // 8. Report loss, largest difference, bytes sent, peak memory, step time.
    show_timeline(options, report);
    return print_report(options, line, report);
  });
}
