// The hybrid: a cube of ranks, and which axes go together.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/run/program.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/runs.h"
#include "chapters/figures/shapes.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"

namespace shardbook::figures::page_14 {
namespace {

using pictures::Figure;
using pictures::Point;

// The bytes that rank 0 sends over each group in one step.
std::map<std::string, double> sent_by_group(const Options& options,
                                            hybrid::HybridOptions setup) {
  hybrid::check_legal(options, setup);
  std::map<std::string, double> sent;
  run_ranks(options.world_size, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, hybrid::topology_of(setup));
    const auto strategy = hybrid::make_strategy(options, setup, mesh);
    world.clear_records();
    strategy->step(0);
    if (world.rank() != 0) return;
    for (const CommRecord& record : world.records()) {
      sent[record.group] += wire_bytes(record);
    }
  });
  return sent;
}

std::string cube() {
  Options options = on_shapes("none", 8, "gpt-nano", 16, 64);
  options.backend = "threads";
  options.data = "walk";
  hybrid::HybridOptions setup;
  setup.tp = setup.pp = 2;
  setup.dp = 2;
  setup.micro_batches = 4;
  std::map<std::string, double> sent = sent_by_group(options, setup);
  const Topology topology = hybrid::topology_of(setup);

  struct AxisOfCube {
    const char *name, *group, *does;
    Stroke stroke;
    Point edge;  // from a rank to its neighbour
  };
  const std::vector<AxisOfCube> axes = {
      {"tp", "tp", "f and g, in every layer and micro-batch", kBlue, {70, 0}},
      {"dp", "dp-cp", "gradients, once per step", kGreen, {44, -32}},
      {"pp", "pp", "activations, in every micro-batch", kOrange, {0, 92}}};
  double most = 0;
  for (const AxisOfCube& axis : axes) most = std::max(most, sent[axis.group]);

  Figure figure(
      "Tensor parallelism sends the most, so its ranks are neighbours\n"
      "dp 2 x pp 2 x tp 2. Thickness: bytes that rank 0 sends along an edge in "
      "a step.",
      640);
  const double top = figure.add_row(190) + 56;
  const auto at = [&](int rank) {
    Point point{30, top};
    for (const AxisOfCube& axis : axes) {
      const int steps = topology.coordinate(rank, axis.name);
      point.x += steps * axis.edge.x;
      point.y += steps * axis.edge.y;
    }
    return point;
  };
  double row = top - 14;
  for (const AxisOfCube& axis : axes) {
    const double bytes = sent[axis.group];
    for (const std::vector<int>& pair : topology.groups({axis.name})) {
      figure.line({at(pair[0]), at(pair[1])}, axis.stroke.color,
                  std::max(1.5, std::round(100 * bytes / most) / 10));
    }
    figure.text(220, row + 13, axis.name, Figure::Anchor::kStart,
                axis.stroke.color);
    figure.colored_box({250, row, 260 * bytes / most, 18}, axis.stroke.color);
    figure.text(256 + 260 * bytes / most, row + 13,
                fmt::format("{:.0f} KiB", bytes / 1024));
    figure.text(250, row + 34, axis.does, Figure::Anchor::kStart,
                pictures::kMuted);
    row += 50;
  }
  for (int rank = 0; rank < options.world_size; ++rank) {
    const Point p = at(rank);
    named_box(figure, {p.x - 11, p.y - 11, 22, 22}, pictures::kInk,
              std::to_string(rank));
  }
  return figure.svg("");
}

std::string legal() {
  constexpr double kName = 130, kCell = 38, kRow = 20, kGap = 18;
  Figure figure(
      "ZeRO-2 and ZeRO-3 go with tensor and context parallelism, not with "
      "stages\nRows: axes above 1. Columns: stage of ZeRO. Filled: legal.",
      640);
  const auto x_of = [&](int column) {
    return kName + kCell * column + kGap * (column / 4);
  };
  const double names = figure.add_row(20) + 14;
  for (const auto& [column, name] :
       {std::pair(0, "without experts"), std::pair(4, "experts over ep"),
        std::pair(8, "image models")}) {
    figure.text(x_of(column), names, name);
  }
  const double stages = figure.add_row(18) + 13;
  for (int column = 0; column < 12; ++column) {
    figure.text(x_of(column) + kCell / 2 - 1, stages,
                std::to_string(column % 4), Figure::Anchor::kMiddle,
                pictures::kMuted);
  }
  std::istringstream lines(hybrid::combinations_text());
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);
  while (std::getline(lines, line) && line[0] != '[') {
    // "dp x tp           yes yes [6] [7]   yes ..."
    const std::size_t begin = line.find_first_of("y[");
    std::string name = line.substr(0, begin);
    name.erase(name.find_last_not_of(' ') + 1);
    const double y = figure.add_row(kRow);
    figure.text(0, y + 13, name);
    std::istringstream words(line.substr(begin));
    int column = 0;
    for (std::string word; words >> word; ++column) {
      const bool is_legal = word == "yes";
      figure.box({x_of(column), y, kCell - 2, kRow - 2},
                 is_legal ? "optimizer" : "empty");
      if (is_legal) continue;
      figure.text(x_of(column) + kCell / 2 - 1, y + 13, word,
                  Figure::Anchor::kMiddle, pictures::kMuted);
    }
  }
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/14_hybrid_3d/cube.svg", cube},
          {"chapters/14_hybrid_3d/legal.svg", legal}};
}

}  // namespace shardbook::figures::page_14
