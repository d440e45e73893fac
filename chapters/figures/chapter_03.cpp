// ZeRO and FSDP: what each stage shards, and when FSDP gathers.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/lanes.h"

namespace shardbook::figures::page_03 {

std::string states() {
  constexpr double kParameters = 7.5e9, kRanks = 64, kBegin = 90, kMost = 120e9;
  Figure figure(
      "Each stage divides one more kind by the ranks\n"
      "7.5 billion parameters with Adam in mixed precision, on 64 ranks");
  figure.legend({"kind-parameter: parameters", "kind-gradient: gradients",
                 "kind-optimizer_state: optimizer state"});
  const double pixels = (figure.width() - kBegin - 70) / kMost;
  for (int stage = 0; stage <= 3; ++stage) {
    const zero::ModelStates states =
        zero::model_states(stage, kParameters, static_cast<int>(kRanks));
    const double y = figure.add_row(32) + 4;
    const std::string name = stage == 0 ? "DDP" : fmt::format("ZeRO-{}", stage);
    figure.text(0, y + 16, name);
    const double end =
        figure.stack({kBegin, y, 0, 22},
                     {{pixels * states.parameters, "kind-parameter"},
                      {pixels * states.gradients, "kind-gradient"},
                      {pixels * states.optimizer, "kind-optimizer_state"}});
    const std::string total = fmt::format("{:.3g} GB", states.total() / 1e9);
    figure.text(end + 6, y + 16, total);
    figure.describe(fmt::format("{}: {}", name, total));
  }
  figure.axis(kBegin, kBegin + pixels * kMost, kMost, {"GB", 1e9}, "per rank");
  return figure.svg();
}

Report fsdp(const std::string& prefetch) {
  return run_once("03_zero_fsdp" + on_shapes("textbook", 8, "gpt2", 16, 1024) +
                  " --backward-prefetch " + prefetch);
}

double computing_s(const Report& report) {
  const double length = report.time.step_s;
  return length * sim::queue_shares(first_rank(report), "compute", length).busy;
}

std::string gathers() {
  const std::vector<std::pair<std::string, Report>> runs = {
      {"gather the next unit while one computes", fsdp("pre")},
      {"gather a unit when it is needed", fsdp("none")}};
  Figure figure(
      "Gathers hide behind computation, if they begin one unit early\n"
      "FSDP, one step of GPT-2 on 8 ranks of the cluster textbook");
  figure.legend({"forward", "backward", "comm: gather, reduce-scatter",
                 "exposed: waits for its message",
                 "bubble: its message waits for another"});
  // The second is the longer one
  Lanes lanes(figure, 90, figure.width(), runs[1].second.time.step_s);
  for (const auto& [name, report] : runs) {
    const sim::RankTimeline step = first_rank(report);
    figure.result(
        fmt::format("{}: {:.1f} ms, {:.1f} ms of it waiting", name,
                    1e3 * report.time.step_s,
                    1e3 * (report.time.step_s - computing_s(report))));
    lanes.queue("compute", step, "compute", report.time.step_s, 22);
    lanes.queue("network", step, "comm world", report.time.step_s, 16);
  }
  lanes.axis(kMilliseconds);
  return figure.svg();
}

/// One use of a unit: its gather, a computation or its reduce-scatter.
struct Span {
  std::string css_class = "";
  double begin = 0, end = 0;
};
struct UnitLife {
  std::string name = "root";
  double bytes = 0;  ///< whole
  std::vector<Span> gathers, computations, reductions;
};

constexpr double kShare = 7.0 / 8;  // of a message that a rank of 8 sends

// The root, then the blocks. A block's forward begins with its first norm, and
// its backward ends with that norm.
std::vector<UnitLife> lives_of(const sim::RankTimeline& step, int num_blocks) {
  const std::size_t blocks = num_blocks;
  std::vector<UnitLife> units(blocks + 1);
  for (std::size_t i = 0; i < blocks; ++i) {
    units[i + 1].name = fmt::format("block {}", i);
  }
  std::size_t forward_norms = 0, backward_norms = 0, before = 0;
  for (const sim::TimelineEvent& event : step.events) {
    const bool is_gather = event.name == "all_gather";
    if (is_gather || event.name == "reduce_scatter") {
      const std::size_t dot = event.label.rfind('.');
      UnitLife& unit = dot == std::string::npos
                           ? units[0]
                           : units[1 + std::stoul(event.label.substr(dot + 1))];
      (is_gather ? unit.gathers : unit.reductions)
          .push_back({"comm", event.begin_s, event.end_s});
      unit.bytes = event.bytes / kShare;
    }
    const bool is_forward = event.category == "forward";
    if (event.queue != "compute") continue;
    if (!is_forward && event.category != "backward") continue;
    const bool is_norm = event.name == "layer_norm";
    std::size_t& norms = is_forward ? forward_norms : backward_norms;
    if (is_norm && is_forward) ++norms;
    std::size_t unit = 0;  // the root's, unless between norms of blocks
    if (norms > 0 && norms <= 2 * blocks) {
      const std::size_t block = (norms - 1) / 2;
      unit = is_forward ? 1 + block : blocks - block;
    }
    if (is_norm && !is_forward) ++norms;
    // Operations without a time may come before a wait
    if (unit > 0 && event.end_s == event.begin_s) continue;
    std::vector<Span>& spans = units[unit].computations;
    if (spans.empty() || unit != before ||
        spans.back().css_class != event.category) {
      spans.push_back({event.category, event.begin_s, event.end_s});
    }
    spans.back().end = std::max(spans.back().end, event.end_s);
    before = unit;
  }
  return units;
}

/// From the begin of a gather to the end of its computation; the root is kept
/// from forward to backward.
std::vector<Span> whole(const UnitLife& unit) {
  const bool is_kept = unit.gathers.size() == 1;
  std::vector<Span> spans;
  for (std::size_t i = 0; i < unit.gathers.size(); ++i) {
    const Span& last =
        is_kept ? unit.computations.back() : unit.computations.at(i);
    spans.push_back({"empty", unit.gathers[i].begin, last.end});
  }
  return spans;
}

std::string units() {
  constexpr double kBegin = 130, kRow = 17;
  const std::vector<UnitLife> units = lives_of(first_rank(fsdp("pre")), 12);
  Figure figure(
      "A block is whole twice: for its forward and for its backward\n"
      "FSDP, one step of GPT-2 on 8 ranks of the cluster textbook");
  figure.legend({"comm: gather, or reduce-scatter behind backward",
                 "empty: whole, waits", "forward", "backward"});
  Lanes lanes(figure, kBegin, figure.width() - 10, 20e-3);
  figure.add_row(4);
  for (const UnitLife& unit : units) {
    const double y = figure.add_row(kRow);
    figure.text(0, y + 13, unit.name);
    figure.end(kBegin - 12, y + 13,
               fmt::format("{:.0f} MiB", unit.bytes / (1 << 20)));
    for (const std::vector<Span>& spans :
         {whole(unit), unit.gathers, unit.computations, unit.reductions}) {
      for (const Span& span : spans) {
        lanes.bar(span.begin, span.end, y, kRow, kRow - 4, span.css_class);
      }
    }
    if (unit.name == "block 0") {
      figure.middle(
          (lanes.x(unit.computations[0].end) + lanes.x(unit.gathers[1].begin)) /
              2,
          y + 13, "freed: each rank keeps its eighth");
    }
  }
  lanes.axis(kMilliseconds);
  return figure.svg(fmt::format(
      "Block 0 is gathered at {:.1f} ms, freed at {:.1f} ms, and gathered "
      "again at {:.1f} ms.",
      1e3 * units[1].gathers[0].begin, 1e3 * units[1].computations[0].end,
      1e3 * units[1].gathers[1].begin));
}

// The bytes of parameters over time: the shard, and what is whole.
std::vector<Value> parameters(const Report& report) {
  std::vector<std::pair<double, double>> changes;
  double bytes = 0;
  for (const UnitLife& unit : lives_of(first_rank(report), 12)) {
    bytes += unit.bytes / 8;
    for (const Span& span : whole(unit)) {
      changes.push_back({span.begin, unit.bytes});
      changes.push_back({span.end, -unit.bytes});
    }
  }
  std::sort(changes.begin(), changes.end());
  std::vector<Value> values = {{0, bytes}};
  for (const auto& [time, change] : changes) {
    values.push_back({time, bytes});
    values.push_back({time, bytes += change});
  }
  values.push_back({report.time.step_s, bytes});
  return values;
}

std::string saw() {
  constexpr double kMiB = 1 << 20, kDdp = 474.7 * kMiB;
  const Report early = fsdp("pre"), late = fsdp("none");
  const std::vector<Value> values = parameters(early);
  const double most = most_of(values, &Value::y);
  Plot plot(
      "FSDP holds its shard, the root and at most three blocks\n"
      "Parameters of a rank in one step of GPT-2 on 8 ranks; a block counts "
      "from its gather to the end of its computation",
      {60, 565, 220}, {"time", 0, late.time.step_s, kMilliseconds},
      {"parameters", 0, 500 * kMiB, {"MiB", kMiB}});
  plot.curve({{0, kDdp}, {late.time.step_s, kDdp}}, kGray);
  plot.curve(values, kBlue);
  plot.curve(parameters(late), kOrange);
  plot.text(0.2e-3, 448 * kMiB, "DDP: all 475 MiB", kGray);
  plot.text(8e-3, 308 * kMiB, "blocks are gathered one early", kBlue);
  plot.end(25.9e-3, 308 * kMiB, "blocks are gathered on demand", kOrange);
  plot.middle(7.1e-3, 170 * kMiB, "shard and root: 210 MiB", kGray);
  plot.end(19.8e-3, 22 * kMiB, "shard: 59 MiB", kBlue);
  return plot.svg(fmt::format(
      "The peak is {:.0f} MiB, against 475 MiB under DDP.", most / kMiB));
}

// The step of the page's table of times: four blocks, whose messages are
// shorter than their computations.
std::string times() {
  constexpr double kRow = 20;
  const Report report =
      run_once("03_zero_fsdp" + on_shapes("textbook", 8, "gpt-nano", 8192, 64));
  const sim::RankTimeline step = first_rank(report);
  const std::vector<UnitLife> units = lives_of(step, 4);
  const double length = report.time.step_s;
  Figure figure(
      "A step of FSDP is the sum of four parts\nFSDP on 8 ranks of textbook, "
      "gpt-nano with 65,536 tokens per rank; r root, 0 to 3 blocks, h head");
  figure.legend({"comm: message", "forward", "backward"});
  Lanes lanes(figure, 104, figure.width() - 10, length);
  const double top = figure.add_row(6);
  using Bars = std::vector<std::pair<Span, std::string>>;
  const auto row = [&](const char* name, const Bars& bars) {
    const double y = figure.add_row(kRow + 18);
    figure.text(0, y + 28, name);
    for (const auto& [span, word] : bars) {
      const double x = lanes.x(span.begin);
      const double width = lanes.pixels(span.end - span.begin);
      figure.box({x + 0.5, y + 16, width - 1, kRow - 4}, span.css_class);
      figure.middle(x + width / 2, y + 13, word);
    }
  };
  Bars gathers, sums, computations, reductions;
  double forward_ends = 0, backward_ends = 0;
  for (const UnitLife& unit : units) {
    const bool is_root = &unit == &units[0];
    const std::string word = is_root ? "r" : unit.name.substr(6);
    for (const Span& span : unit.gathers) gathers.emplace_back(span, word);
    for (const Span& span : unit.computations) {
      if (lanes.pixels(span.end - span.begin) < 2) continue;  // the embedding
      if (is_root && span.css_class == "forward") forward_ends = span.end;
      computations.emplace_back(span, is_root ? "h" : word);
    }
    for (const Span& span : unit.reductions) {
      reductions.emplace_back(span, word);
      backward_ends = std::max(backward_ends, span.end);
    }
  }
  for (const sim::TimelineEvent& event : step.events) {
    if (event.name != "all_reduce") continue;
    sums.push_back({{"comm", event.begin_s, event.end_s}, event.label});
  }
  row("all-gather", gathers);
  row("all-reduce", sums);
  row("compute", computations);
  row("reduce-scatter", reductions);
  // The last block's backward begins when its gather has ended
  const double head_ends = units.back().gathers.back().end;
  const double bottom = figure.add_row(28);
  const std::vector<std::pair<const char*, double>> parts = {
      {"forward: ", forward_ends},
      {"head: ", head_ends},
      {"backward: ", backward_ends},
      {"", length}};
  double begin = 0;
  for (const auto& [name, end] : parts) {
    figure.line({{lanes.x(end), top + 10}, {lanes.x(end), bottom + 8}}, kInk, 1,
                "4 3");
    const std::string result =
        fmt::format("{}{:.0f} µs", name, 1e6 * (end - begin));
    figure.middle((lanes.x(begin) + lanes.x(end)) / 2, bottom + 20, result);
    figure.describe(result);
    begin = end;
  }
  lanes.axis({"µs", 1e-6});
  return figure.svg();
}

std::string threshold() {
  // (d - 1) / d e rate / (2 bandwidth)
  const double tokens =
      7.0 / 8 * 4 * textbook::kRate / (2 * textbook::kBandwidth);
  constexpr int kSeq = 250;
  const auto times = [&](const char* line, const Column& column) {
    return sweep(
        [&](double samples) {
          return line + on_shapes("textbook", 8, "gpt2-xl", 8 * samples, kSeq);
        },
        {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16}, column, kSeq);
  };
  const auto sharded = times("03_zero_fsdp", step_s);
  const auto computing = times("03_zero_fsdp", computing_s);
  const auto replicated = times("02_ddp --bucket-mb 100", step_s);
  Plot plot(
      "Above the marked tokens per device, FSDP's messages hide\n"
      "GPT-2 XL in f32 on 8 ranks of textbook",
      {60, 565, 240}, {"tokens per device and micro-batch", 0, 4000},
      {"time of a step", 0, 400e-3, kMilliseconds});
  plot.mark(tokens, kGray, fmt::format("inequality: {:.0f}", tokens));
  plot.curve(computing, kGray);
  plot.curve(replicated, kOrange);
  plot.dotted_curve(sharded, kBlue);
  plot.text(260, 0.212, "FSDP: three messages of eΨ bytes", kBlue);
  plot.text(260, 0.076, "DDP: two", kOrange);
  plot.text(1080, 0.066, "computing alone", kGray);
  plot.text(2500, 0.168, "8 ms above it: the ends of the step", kBlue);
  return plot.svg(fmt::format(
      "FSDP takes {:.0f} ms at {:.0f} tokens and {:.0f} ms at {:.0f}.",
      1e3 * sharded.front().y, sharded.front().x, 1e3 * sharded.back().y,
      sharded.back().x));
}

std::vector<PageFigure> all() {
  return {{"chapters/03_zero_fsdp/states.svg", states},
          {"chapters/03_zero_fsdp/units.svg", units},
          {"chapters/03_zero_fsdp/gathers.svg", gathers},
          {"chapters/03_zero_fsdp/memory.svg", saw},
          {"chapters/03_zero_fsdp/threshold.svg", threshold},
          {"chapters/03_zero_fsdp/times.svg", times}};
}

}  // namespace shardbook::figures::page_03
