// 1F1B and its family: schedules, and when zero bubble hides its messages.

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/pages.h"
#include "chapters/pictures/layouts.h"

namespace shardbook::figures::page_06 {

NamedSchedule timed(const std::string& name, const std::string& title, int p,
                    int m) {
  pipeline::schedules::ScheduleOptions options;
  options.num_ranks = p;
  options.micro_batches = m;
  options.chunks = 2;
  const pipeline::Schedule schedule =
      pipeline::schedules::make_schedule(name, options);
  pipeline::Costs costs;
  if (schedule.num_stages > p) {  // a chunk is half of a stage
    costs.forward = costs.backward_input = costs.backward_weight = 0.5;
    costs.backward = 1;
  }
  return {title, schedule, pipeline::replay(schedule, costs)};
}

double most_sets(const pipeline::Schedule& schedule) {
  return most_of(
      pipeline::max_live_activations(schedule, pipeline::Until::kWeight),
      std::identity());
}

std::string orders() {
  const auto lanes = [](const char* name, const std::string& title) {
    NamedSchedule one = timed(name, "", 4, 8);
    one.name =
        fmt::format("{}: {:g} units of time, at most {:g} sets of activations",
                    title, one.replay.makespan, most_sets(one.schedule));
    return one;
  };
  return schedules(
             "1F1B takes as long as GPipe with half of the activations; zero "
             "bubble fills the gaps",
             {lanes("gpipe", "GPipe"), lanes("1f1b", "1F1B"),
              lanes("zb-h1", "ZB-H1, gradients of inputs and of weights apart"),
              lanes("zb-h2", "ZB-H2, the same")})
      .svg;
}

std::string trade() {
  struct Named {
    const char *name, *title;
    Point by = {8, 4};  // of its label
    Figure::Anchor anchor = Figure::Anchor::kStart;
  };
  const std::vector<Named> all = {
      {"gpipe", "GPipe", {-8, 4}, Figure::Anchor::kEnd},
      {"1f1b", "1F1B"},
      {"interleaved", "interleaved, v = 2"},
      {"zb-h1", "ZB-H1", {-8, 4}, Figure::Anchor::kEnd},
      {"zb-h2", "ZB-H2", {0, -10}, Figure::Anchor::kMiddle},
      {"dualpipe", "DualPipe"}};
  Plot plot(
      "No schedule has both the fewest sets and the least idle time\n"
      "A point per schedule: 8 ranks, 16 micro-batches, equal times for F, I "
      "and W",
      {50, 575, 240},
      {"sets of activations on the fullest rank, each of one stage", 0, 18},
      {"idle share of a rank, from its first action to its last", 0, 0.4,
       kPercent});
  for (const Named& each : all) {
    const NamedSchedule one = timed(each.name, each.title, 8, 16);
    double sets = most_sets(one.schedule);
    // A rank of DualPipe has two whole stages
    if (one.schedule.num_stages == 16) sets /= 2;  // of half a stage
    const double idle = pipeline::window_bubble(one.replay);
    plot.dots({{sets, idle}}, kBlue);
    const std::string text =
        fmt::format("{}: {:.0f} %", each.title, 100 * idle);
    plot.text(sets, idle, text, kBlack, each.by, each.anchor);
    plot.describe(fmt::format("{} with {:g} sets", text, sets));
  }
  return plot.svg();
}

// GPT-2's width or another, one block per stage, 25 tokens per sequence.
std::vector<Value> idle_shares(const char* schedule, int width,
                               const std::vector<double>& samples) {
  constexpr int kMicroBatches = 256, kTokens = 25;
  const std::string model = gpt_of(8, width, 4, 64, 64);
  return sweep(
      [&](double each) {
        return "06_1f1b" +
               on_shapes("textbook", 8, model, kMicroBatches * each, kTokens) +
               fmt::format(
                   " --steps 1 --schedule {} --micro-batches {} --partition "
                   "type:block",
                   schedule, kMicroBatches);
      },
      samples, idle_share, kTokens);
}

std::string hidden() {
  constexpr double kWidth = 768, kBytes = 4;
  const double tokens =
      textbook::kLatency / (12 * kWidth * kWidth / textbook::kRate -
                            kBytes * kWidth / textbook::kBandwidth);
  Plot plot(
      "ZB-H1 hides its messages from 125 tokens on, 1F1B never all of them\n"
      "8 ranks of textbook, one block per stage, 256 micro-batches",
      {50, 450, 240}, logarithmic("tokens of a micro-batch", 25, 400),
      {"idle share of a step", 0, 0.9, kPercent});
  const auto narrow = idle_shares("zb-h1", 256, {1, 2, 4, 8, 16});
  const auto one = idle_shares("1f1b", 768, {1, 2, 4, 8, 16});
  const auto zero = idle_shares("zb-h1", 768, {1, 2, 3, 4, 5, 6, 8, 16});
  plot.mark(tokens, kBlue, fmt::format("inequality: {:.0f} tokens", tokens));
  plot.curve(narrow, kOrange, "ZB-H1, h = 256");
  plot.curve(one, kGray, "1F1B, h = 768");
  plot.dotted_curve(zero, kBlue, "ZB-H1, h = 768");
  std::string details;
  for (const Value& value : zero) {
    details += fmt::format("{:g} tokens: {:.1f} %. ", value.x, 100 * value.y);
  }
  return plot.svg("ZB-H1 with h = 768 idles for: " + details);
}

// PipeDream's lists, and below each action the version of the weights that it
// reads.
std::string versions() {
  constexpr int kRanks = 4, kMiniBatches = 8;
  constexpr double kBegin = 60, kUnit = 23, kRow = 22;
  const pipeline::Schedule schedule =
      pipeline::schedules::pipedream(kRanks, kMiniBatches);
  const pipeline::Replay replay = pipeline::replay(schedule);
  const std::vector<pipeline::VersionRecord> records =
      pipeline::versions(schedule);
  const auto version = [&](int stage, int j) {
    const auto found =
        std::find_if(records.begin(), records.end(), [&](const auto& one) {
          return one.stage == stage && one.micro_batch == j;
        });
    return found->read;
  };
  Figure figure(
      "Forward and backward of a mini-batch read the same version of the "
      "weights\nThe first 8 mini-batches. In the boxes: the mini-batch. Below "
      "them: the version that is read. Every backward ends with an update.",
      kBegin + kUnit * replay.makespan + 10);
  for (int rank = 0; rank < kRanks; ++rank) {
    const double y = figure.add_row(kRow + 24);
    figure.text(0, y + 15, fmt::format("rank {}", rank));
    figure.text(0, y + kRow + 13, "version", kMuted);
    figure.box({kBegin, y, kUnit * replay.makespan, kRow}, "empty");
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const pipeline::Action& action = schedule.actions[rank][i];
      const pipeline::Span& span = replay.spans[rank][i];
      const double x = kBegin + kUnit * span.begin;
      const double width = kUnit * (span.end - span.begin) - 1;
      if (action.kind == pipeline::ActionKind::kUpdate) continue;
      const bool is_forward = action.kind == pipeline::ActionKind::kForward;
      figure.box({x, y, width, kRow}, is_forward ? "forward" : "backward",
                 std::to_string(action.micro_batch));
      figure.middle(x + width / 2, y + kRow + 13,
                    std::to_string(version(rank, action.micro_batch)),
                    is_forward ? "forward" : "backward");
    }
  }
  figure.axis(kBegin, kBegin + kUnit * replay.makespan, replay.makespan,
              {"units", 1}, "time");
  figure.legend({"forward", "backward", "empty: idle"});
  return figure.svg(
      "Mini-batch j reads version max(0, j - 3) on rank 0 and version j on "
      "rank 3.");
}

std::vector<PageFigure> all() {
  return {{"chapters/06_1f1b/orders.svg", orders},
          {"chapters/06_1f1b/trade.svg", trade},
          {"chapters/06_1f1b/hidden.svg", hidden},
          {"chapters/06_1f1b/versions.svg", versions}};
}

}  // namespace shardbook::figures::page_06
