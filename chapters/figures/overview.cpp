// The figures of the whole book: one step by several strategies on one axis, for
// the README, and the fastest plans.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/common/models/models.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/lanes.h"
#include "chapters/planner/search.h"

namespace shardbook::figures::page_overview {

std::string overview() {
  const auto on_ranks = [](int world_size, const char* line) {
    return run_once(line +
                    on_shapes("dgx-a100", world_size, "gpt2-medium", 32, 1024) +
                    " --dtype bf16");
  };
  const std::vector<std::pair<const char*, Report>> ways = {
      {"One device", on_ranks(1, "00_single_device")},
      {"DDP", on_ranks(4, "02_ddp")},
      {"FSDP", on_ranks(4, "03_zero_fsdp")},
      {"GPipe", on_ranks(4, "06_1f1b --micro-batches 8 --schedule gpipe")},
      {"1F1B", on_ranks(4, "06_1f1b --micro-batches 8 --schedule 1f1b")},
      {"Zero bubble",
       on_ranks(4, "06_1f1b --micro-batches 8 --schedule zb-h2")}};

  constexpr double kLane = 11;
  Figure figure(
      "One step of the same training, by one device and by four\n"
      "GPT-2 medium, 32 samples of 1024 tokens, on simulated A100; a lane per "
      "device");
  figure.legend({"forward", "backward", "weights: gradients of weights",
                 "optimizer: update", "bubble: waits", "empty: idle"});
  figure.add_row(6);
  Lanes lanes(figure, 130, figure.width(), ways[0].second.time.step_s);
  for (const auto& [name, report] : ways) {
    const sim::StepView view = sim::last_step(report.timelines);
    const double length = report.time.step_s;
    const std::size_t devices = name == ways[0].first ? 1 : 4;
    const double top = figure.add_row(devices == 1 ? 38 : 4 * kLane + 14);
    figure.text(0, top + 11, name);
    figure.text(0, top + 26, fmt::format("{:.0f} ms", 1e3 * length), kMuted);
    figure.describe(fmt::format("{} {:.0f} ms", name, 1e3 * length));
    for (std::size_t i = 0; i < devices; ++i) {
      // Ranks of which only the first ran do all the same
      const sim::RankGroup& group =
          view.groups[std::min(i, view.groups.size() - 1)];
      lanes.draw(group.timeline, "compute", length, top + i * (kLane + 1),
                 kLane);
    }
  }
  lanes.axis(kMilliseconds);
  return figure.svg();
}

// Which one?: the fastest plan by model and by number of devices.

planner::PlanRequest request_for(const std::string& model, int devices,
                                 std::int64_t batch) {
  planner::PlanRequest request;
  request.model = model;
  request.world_size = devices;
  request.batch = batch;
  request.base.sizes.seq =
      model_config(planner::options_of(request)).n_positions;
  planner::read_model(request, sim::Cluster::read("dgx-a100"));
  return request;
}

std::string map() {
  constexpr double kName = 70, kCell = 142, kRow = 62;
  Figure figure(
      "ZeRO-3 nearly everywhere: offload on few devices, TP on many\n"
      "The fastest plan that fits on A100 of 80 GB, and the share of their "
      "peak that it reaches (bar)");
  const double names = figure.add_row(22) + 14;
  const std::vector<int> all_devices = {1, 8, 64, 512};
  for (std::size_t c = 0; c < all_devices.size(); ++c) {
    figure.middle(kName + kCell * (c + 0.5), names,
                  fmt::format("{} device{}", all_devices[c],
                              all_devices[c] == 1 ? "" : "s"),
                  kMuted);
  }
  for (const auto& [model, batch] :
       {std::pair("gpt-1.3b", 512), std::pair("gpt-13b", 1024),
        std::pair("gpt-70b", 1024)}) {
    const double y = figure.add_row(kRow);
    figure.text(0, y + 26, model);
    for (std::size_t c = 0; c < all_devices.size(); ++c) {
      const double x = kName + kCell * c;
      figure.box({x, y, kCell - 4, kRow - 4}, "empty");
      const planner::PlanRequest request =
          request_for(model, all_devices[c], batch);
      const planner::PlanResult result = planner::search(request, {.top = 1});
      if (result.best.empty()) {
        figure.text(x + 8, y + 18, "nothing fits", kMuted);
        continue;
      }
      const planner::Prediction& best = result.best[0];
      const double share = planner::mfu(request, best);
      // "tp 4 x pp 2 x dp 8, ZeRO-1": degrees, then the rest
      const std::string layout = best.plan.layout_text();
      const std::size_t comma = std::min(layout.find(", "), layout.size());
      figure.text(x + 8, y + 18, layout.substr(0, comma));
      if (comma < layout.size()) {
        figure.text(x + 8, y + 34, layout.substr(comma + 2));
      }
      figure.box({x + 8, y + 44, 120 * share, 8}, "time");
      figure.text(x + 12 + 120 * share, y + 53,
                  fmt::format("{:.0f} %", 100 * share));
    }
  }
  return figure.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/overview.svg", overview}, {"chapters/which.svg", map}};
}

}  // namespace shardbook::figures::page_overview
