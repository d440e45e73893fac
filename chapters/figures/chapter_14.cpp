// The hybrid: a cube of ranks, and which axes go together.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/figures/figures.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"

namespace shardbook::figures::page_14 {

std::string cube() {
  hybrid::HybridOptions setup;
  setup.tp = setup.pp = setup.dp = 2;
  const Topology topology = hybrid::topology_of(setup);
  std::map<std::string, double> sent =
      sent_by_group(run_once("14_hybrid_3d --tp 2 --pp 2 --micro-batches 4" +
                             on_shapes("textbook", 8, "gpt-nano", 16, 64)));

  struct AxisOfCube {
    const char *name, *group, *does;
    Stroke stroke;
    Point edge;  // from a rank to its neighbour
  };
  const std::vector<AxisOfCube> axes = {
      {"tp", "tp", "sums of activations, in every layer", kBlue, {66, 0}},
      {"dp", "dp-cp", "gradients, once per step", kGreen, {38, -32}},
      {"pp", "pp", "activations, in every micro-batch", kOrange, {0, 92}}};
  const double most =
      most_of(axes, [&](const AxisOfCube& axis) { return sent[axis.group]; });

  Figure figure(
      "Tensor parallelism sends the most\n"
      "dp 2 x pp 2 x tp 2. Thickness: bytes that rank 0\n"
      "sends along an edge in a step",
      460);
  const double top = figure.add_row(182) + 52;
  const auto at = [&](int rank) {
    Point point{20, top};
    for (const AxisOfCube& axis : axes) {
      const int steps = topology.coordinate(rank, axis.name);
      point.x += steps * axis.edge.x;
      point.y += steps * axis.edge.y;
    }
    return point;
  };
  constexpr double kBars = 184, kLongest = 180;
  double row = top - 30;
  for (const AxisOfCube& axis : axes) {
    const double bytes = sent[axis.group];
    for (const std::vector<int>& pair : topology.groups({axis.name})) {
      figure.line({at(pair[0]), at(pair[1])}, axis.stroke.color,
                  std::max(1.5, std::round(100 * bytes / most) / 10));
    }
    figure.text(kBars - 26, row + 13, axis.name, axis.stroke.color);
    figure.box({kBars, row, kLongest * bytes / most, 18}, axis.stroke.color);
    figure.text(kBars + 6 + kLongest * bytes / most, row + 13,
                fmt::format("{:.0f} KiB", bytes / 1024));
    figure.text(kBars, row + 34, axis.does, kMuted);
    row += 56;
  }
  for (int rank = 0; rank < topology.world_size(); ++rank) {
    const Point p = at(rank);
    figure.box({p.x - 11, p.y - 11, 22, 22}, kInk, std::to_string(rank));
  }
  return figure.svg();
}

// The ranks that one rank adds its gradient with, by the first parameter of
// each of its buckets.
using Partners = std::map<std::string, std::set<int>>;

std::vector<Partners> partners_of_ranks(const Options& options,
                                        hybrid::HybridOptions setup) {
  hybrid::check_legal(options, setup);
  std::vector<Partners> all(options.world_size);
  run_ranks(options.world_size, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, hybrid::topology_of(setup));
    const hybrid::HybridStrategy strategy(options, setup, mesh);
    Partners& own = all[world.rank()];
    for (const hybrid::UpdateBucket& bucket : strategy.update().buckets()) {
      std::set<int>& ranks = own[bucket.parameters[0].name];
      const auto add = [&](const ProcessGroup& group) {
        ranks.insert(group.ranks().begin(), group.ranks().end());
      };
      add(*bucket.data);
      if (bucket.tied != nullptr) add(*bucket.tied);
      if (bucket.is_partial) add(mesh.group("tp"));
    }
  });
  return all;
}

// The first rank of each rank's sum.
std::vector<int> sums_of(const std::vector<Partners>& partners,
                         const std::string& part_of_name) {
  std::vector<int> first(partners.size());
  std::iota(first.begin(), first.end(), 0);
  // Partners of partners belong to the sum as well
  for (std::size_t round = 0; round < partners.size(); ++round) {
    for (std::size_t rank = 0; rank < partners.size(); ++rank) {
      for (const auto& [name, ranks] : partners[rank]) {
        if (name.find(part_of_name) == std::string::npos) continue;
        for (const int other : ranks) {
          first[other] = first[rank] = std::min(first[other], first[rank]);
        }
      }
    }
  }
  return first;
}

std::string sums() {
  Options options;
  options.world_size = 8;
  options.batch = 16;
  hybrid::HybridOptions setup;
  setup.tp = setup.pp = setup.dp = setup.ep = 2;
  setup.experts = 8;
  setup.sequence_parallel = true;
  // A bucket for each parameter
  setup.bucket_bytes = 1;
  const std::vector<Partners> partners = partners_of_ranks(options, setup);
  struct Row {
    const char *name, *sums, *part_of_name;
  };
  const std::vector<Row> rows = {
      {"matrices that tp cuts", "dp", "attn.c_attn.weight"},
      {"norms, on the tokens of a rank", "dp, tp", "ln_1.weight"},
      {"token table, on both end stages", "dp, pp", "wte"},
      {"experts (ep 2: two halves)", "tp", "expert"}};
  constexpr double kBoxes = 206, kSize = 26, kGap = 10;
  const auto x_of = [&](int rank) {
    return kBoxes + kSize * rank + kGap * (rank / 4);
  };
  Figure figure(
      "Who sums what: one letter in a row is one sum\n"
      "dp 2 x pp 2 x tp 2 with --sequence-parallel --ep 2",
      480);
  const double head = figure.add_row(40) + 14;
  for (const int stage : {0, 1}) {
    figure.text(x_of(4 * stage), head, fmt::format("stage {}", stage));
  }
  figure.text(0, head + 18, "rank", kMuted);
  figure.middle(450, head + 18, "over", kMuted);
  for (int rank = 0; rank < 8; ++rank) {
    figure.middle(x_of(rank) + kSize / 2 - 1, head + 18, std::to_string(rank),
                  kMuted);
  }
  for (const Row& row : rows) {
    const double y = figure.add_row(kSize + 8);
    figure.text(0, y + 17, row.name);
    const std::vector<int> first = sums_of(partners, row.part_of_name);
    std::map<int, int> letters;
    for (const int each : first) {
      letters.try_emplace(each, static_cast<int>(letters.size()));
    }
    for (int rank = 0; rank < 8; ++rank) {
      const int letter = letters.at(first[rank]);
      figure.box({x_of(rank), y, kSize - 2, kSize - 2}, rank_color(letter),
                 std::string(1, static_cast<char>('A' + letter)));
    }
    figure.middle(450, y + 17, row.sums);
  }
  return figure.svg();
}

std::string threshold() {
  constexpr std::int64_t kSamples = 256, kSeq = 256;
  constexpr int kTp = 2, kPp = 4;
  const std::string options =
      on_shapes("textbook", 8, "gpt-6.7b", kSamples, kSeq) + " --steps 2";
  const std::vector<double> counts = {8, 16, 32, 64, 128, 256};
  const auto sharded =
      sweep("03_zero_fsdp" + options, "--world-size", counts, step_s);
  const auto hybrid = sweep(
      [&](double ranks) {
        return "14_hybrid_3d" + options +
               fmt::format(
                   " --world-size {} --tp {} --pp {} --zero-stage 1 "
                   "--overlap-grad-reduce --micro-batches {}",
                   ranks, kTp, kPp,
                   std::min(16.0, kSamples * kTp * kPp / ranks));
      },
      counts, step_s);
  std::vector<Value> ideal;
  for (const double x : counts) ideal.push_back({x, sharded[0].y * 8 / x});
  const double most = 2.0 * 1e11 * kSamples * kSeq / (4 * 1e14);
  Plot plot(
      fmt::format("ZeRO-3 alone gains nothing beyond {:.0f} devices\n"
                  "GPT 6.7B, 65536 tokens per step, textbook. Dashed: W = 2 "
                  "βBs / (eγ)",
                  most),
      {56, 300, 220, 480}, logarithmic("devices W", 8, 256),
      {"time of a step", 0.0625, 8, kMilliseconds, true});
  plot.mark(most, kOrange, fmt::format("{:.0f}", most));
  plot.curve(ideal, kGray, "1/W");
  plot.dotted_curve(sharded, kOrange, "ZeRO-3");
  plot.dotted_curve(hybrid, kBlue, "tp 2 x pp 4 x dp");
  return plot.svg();
}

std::string grow() {
  struct Case {
    const char* name;
    int ranks, tp, pp;
    std::int64_t micro_batches;
  };
  const std::vector<Case> cases = {{"one node: tp 8", 8, 8, 1, 16},
                                   {"tp 16", 16, 16, 1, 16},
                                   {"tp 8 x pp 2", 16, 8, 2, 16},
                                   {"tp 8 x dp 2", 16, 8, 1, 8}};
  constexpr double kBars = 120, kLongest = 240;
  Figure figure(
      "A second node: stages or replicas, not wider layers\n"
      "GPT 6.7B in bf16, 64 samples of 1024 tokens. Time of a step.\n"
      "The end of each bar: idle, for messages or other stages",
      480);
  double first_s = 0;
  for (const Case& each : cases) {
    const VirtualTime time =
        run_once(
            "14_hybrid_3d" +
            on_shapes("dgx-a100", each.ranks, "gpt-6.7b", 64, 1024) +
            fmt::format(" --dtype bf16 --steps 2 --tp {} --pp {} --zero-stage "
                        "1 --overlap-grad-reduce --micro-batches {}",
                        each.tp, each.pp, each.micro_batches))
            .time;
    if (first_s == 0) first_s = time.step_s;
    const double y = figure.add_row(34);
    const double pixels = kLongest * time.step_s / first_s;
    const double idle = time.idle_share;
    figure.text(0, y + 15, each.name);
    figure.stack({kBars, y, 0, 22}, {{pixels * (1 - idle), "forward"},
                                     {pixels * idle, "exposed"}});
    figure.text(
        kBars + pixels + 6, y + 15,
        fmt::format("{:.2f} s, idle {:.0f} %", time.step_s, 100 * idle));
  }
  return figure.svg();
}

std::string legal() {
  constexpr double kName = 112, kCell = 30, kRow = 20, kGap = 14;
  Figure figure(
      "ZeRO-2 and ZeRO-3 go with tp and cp, not with stages\n"
      "Rows: axes above 1. Columns: stage of ZeRO. Filled: legal.",
      504);
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
    figure.middle(x_of(column) + kCell / 2 - 1, stages,
                  std::to_string(column % 4), kMuted);
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
                 is_legal ? "optimizer" : "empty", is_legal ? "" : word,
                 kMuted);
    }
  }
  return figure.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/14_hybrid_3d/cube.svg", cube},
          {"chapters/14_hybrid_3d/sums.svg", sums},
          {"chapters/14_hybrid_3d/threshold.svg", threshold},
          {"chapters/14_hybrid_3d/grow.svg", grow},
          {"chapters/14_hybrid_3d/legal.svg", legal}};
}

}  // namespace shardbook::figures::page_14
