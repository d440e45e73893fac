#include "chapters/04_model_parallel/split_sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/option_values.h"
#include "chapters/common/run/worlds.h"
#include "core/check.h"
#include "core/how_many.h"
#include "core/stream.h"
#include "sim/timeline_text.h"

namespace shardbook::model_parallel {
namespace {

double now_s() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::vector<Device> make_devices(const Options& options, bool on_shapes) {
  return {make_device(options, 0, on_shapes),
          make_device(options, 1, on_shapes)};
}

/// Virtual time of the second of two steps; the first warms up.
double virtual_step_s(const Options& options, const Settings& settings,
                      const sim::CostModel& costs) {
  std::vector<Device> devices = make_devices(options, /*on_shapes=*/true);
  devices.resize(static_cast<std::size_t>(settings.num_devices()));
  RankContext context(devices[0], /*rank=*/0, 1);
  RankContext::Scope scope(context);
  sim::ClockScope clock(costs, 0, false);
  for (std::size_t i = 1; i < devices.size(); ++i) {
    clock.clock().add_device(devices[i], static_cast<int>(i));
  }
  Options two_steps = options;
  two_steps.steps = 2;
  two_steps.log.clear();
  ModelParallelStrategy strategy(two_steps, settings, devices, 1);
  train(two_steps, strategy.optimizer(), /*is_main=*/false,
        [&](std::int64_t step) { return strategy.step(strategy.batch(step)); });
  return clock.clock().last_step_s();
}

/// Returns when the devices have finished their work.
void wait_for(const std::vector<Device>& devices) {
  for (const Device& device : devices) {
    const ContextValue<Device> there(&RankContext::device, device);
    Event end;
    end.record();
    end.synchronize();
  }
}

/// Measures the wall times of all variants, round by round.
void measure(const Options& options, std::int64_t repeats, std::int64_t batches,
             const std::vector<StepTime*>& times) {
  const std::vector<Device> devices = make_devices(options, false);
  const int cores = std::max(1, num_threads() / 2);
  RankContext context(devices[0], /*rank=*/0, cores);
  context.deterministic = options.deterministic;
  context.allow_tf32 = options.tf32;
  RankContext::Scope scope(context);
  Options quiet = options;
  quiet.log.clear();
  std::vector<std::unique_ptr<ModelParallelStrategy>> strategies;
  for (const StepTime* time : times) {
    strategies.push_back(std::make_unique<ModelParallelStrategy>(
        quiet, time->settings, devices, cores));
  }
  const Batch batch = strategies[0]->batch(0);
  std::vector<std::vector<double>> seconds(times.size());
  for (std::int64_t round = 0; round <= repeats; ++round) {
    for (std::size_t i = 0; i < strategies.size(); ++i) {
      if (interrupted()) throw Interrupted("interrupted while measuring");
      const double begin = now_s();
      for (std::int64_t b = 0; b < batches; ++b) strategies[i]->step(batch);
      wait_for(devices);
      seconds[i].push_back(now_s() - begin);
    }
  }
  for (std::size_t i = 0; i < times.size(); ++i) {
    set_wall_times(seconds[i], *times[i]);
  }
}

nlohmann::ordered_json time_json(const StepTime& time) {
  nlohmann::ordered_json json = {{"variant", time.settings.variant}};
  if (time.settings.variant == "pipeline") {
    json["split_size"] = time.settings.split_size;
  }
  if (time.mean_s >= 0) {
    json["wall_s"] = {
        {"mean", time.mean_s}, {"sd", time.sd_s}, {"fastest", time.fastest_s}};
  }
  if (time.virtual_s >= 0) json["virtual_s"] = time.virtual_s;
  return json;
}

}  // namespace

void set_wall_times(const std::vector<double>& seconds, StepTime& time) {
  SB_CHECK(seconds.size() >= 2, "wall times: ", seconds.size(),
           " steps; give one to warm up and at least one to be measured");
  const auto begin = seconds.begin() + 1;
  const auto n = static_cast<double>(seconds.end() - begin);
  time.mean_s = std::accumulate(begin, seconds.end(), 0.0) / n;
  double squares = 0;
  for (auto each = begin; each != seconds.end(); ++each) {
    squares += std::pow(*each - time.mean_s, 2);
  }
  time.sd_s = n > 1 ? std::sqrt(squares / (n - 1)) : 0;
  time.fastest_s = *std::min_element(begin, seconds.end());
}

const StepTime& Sweep::best() const {
  return *std::min_element(pipelined.begin(), pipelined.end(),
                           [](const StepTime& a, const StepTime& b) {
                             return a.mean_s >= 0 ? a.mean_s < b.mean_s
                                                  : a.virtual_s < b.virtual_s;
                           });
}

std::vector<std::int64_t> split_sizes(const std::string& text) {
  const std::vector<int> sizes =
      read_counts("--sweep", text,
                  "give split sizes from 1 up, such as 1,3,5,8,10,12,20,40,60");
  return {sizes.begin(), sizes.end()};
}

Sweep run_sweep(const Options& options, const Settings& settings,
                const std::vector<std::int64_t>& sizes, std::int64_t repeats,
                std::int64_t batches) {
  Sweep sweep;
  sweep.batches = batches;
  sweep.single.settings = sweep.naive.settings = settings;
  sweep.single.settings.variant = "single";
  sweep.single.settings.split_size = 0;
  sweep.naive.settings.variant = "model_parallel";
  for (const std::int64_t size : sizes) {
    StepTime point;
    point.settings = settings;
    point.settings.variant = "pipeline";
    point.settings.split_size = size;
    sweep.pipelined.push_back(point);
  }
  std::vector<StepTime*> times = {&sweep.single, &sweep.naive};
  for (StepTime& point : sweep.pipelined) times.push_back(&point);

  if (const auto costs = cost_model(options)) {
    sweep.cluster = costs->cluster().name;
    for (StepTime* time : times) {
      time->virtual_s = static_cast<double>(batches) *
                        virtual_step_s(options, time->settings, *costs);
    }
  }
  if (options.backend != "sim") {
    sweep.repeats = repeats;
    measure(options, repeats, batches, times);
  }
  return sweep;
}

std::string sweep_text(const Sweep& sweep) {
  std::string text = fmt::format("{:<16}", "sweep");
  if (sweep.repeats > 0) {
    text += fmt::format("{:>20}{:>9}",
                        "wall, " + how_many(sweep.repeats, "repeat"), "");
  }
  if (!sweep.cluster.empty()) text += fmt::format("{:>22}", sweep.cluster);
  text += "\n";
  const auto line = [&](const std::string& name, const StepTime& time) {
    text += fmt::format("  {:<14}", name);
    if (time.mean_s >= 0) {
      text += fmt::format(
          "{:>10} +- {:>6}  x{:<5.2f}", sim::seconds_text(time.mean_s),
          sim::seconds_text(time.sd_s), sweep.single.mean_s / time.mean_s);
    }
    if (time.virtual_s >= 0) {
      text += fmt::format("{:>14}  x{:.2f}", sim::seconds_text(time.virtual_s),
                          sweep.single.virtual_s / time.virtual_s);
    }
    text += "\n";
  };
  line("one device", sweep.single);
  line("naive", sweep.naive);
  for (const StepTime& point : sweep.pipelined) {
    line(fmt::format("splits of {}", point.settings.split_size), point);
  }
  return text;
}

std::string sweep_json(const Sweep& sweep) {
  nlohmann::ordered_json json = {{"repeats", sweep.repeats},
                                 {"cluster", sweep.cluster},
                                 {"single", time_json(sweep.single)},
                                 {"model_parallel", time_json(sweep.naive)},
                                 {"pipeline", nlohmann::ordered_json::array()}};
  for (const StepTime& point : sweep.pipelined) {
    json["pipeline"].push_back(time_json(point));
  }
  return json.dump();
}

void add_sweep(const Options& options, const Settings& settings,
               const Extras& extras, Report& report) {
  if (extras.sweep.empty()) return;
  const Sweep sweep =
      run_sweep(options, settings, split_sizes(extras.sweep), extras.repeats);
  report.more.emplace_back("sweep", sweep_json(sweep));
  report.appendix = sweep_text(sweep);
}

}  // namespace shardbook::model_parallel
