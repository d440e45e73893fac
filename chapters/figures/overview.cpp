// The README's picture: one step by several strategies, on one axis.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/figures/pages.h"
#include "chapters/pictures/lanes.h"

namespace shardbook::figures::page_overview {

std::string overview() {
  const auto on_ranks = [](int world_size, const char* line) {
    return run(line +
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

std::vector<PageFigure> all() { return {{"chapters/overview.svg", overview}}; }

}  // namespace shardbook::figures::page_overview
