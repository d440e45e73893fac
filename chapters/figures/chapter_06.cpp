// 1F1B and its family: schedules, and when zero bubble hides its messages.

#include <fmt/format.h>

#include <functional>
#include <map>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
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
  return plot.svg();
}

// PipeDream's lists, and below each action the version of the weights that it
// reads.
std::string versions() {
  NamedSchedule one = {
      "Mini-batch j reads version max(0, j - 3) on rank 0 and version j on "
      "rank "
      "3",
      pipeline::schedules::pipedream(/*num_ranks=*/4, /*mini_batches=*/8)};
  one.replay = pipeline::replay(one.schedule);
  std::map<std::pair<int, int>, int> read;  // by stage and mini-batch
  for (const auto& record : pipeline::versions(one.schedule)) {
    read[{record.stage, record.micro_batch}] = record.read;
  }
  one.below = [&](int rank, const pipeline::Action& action) {
    const bool is_update = action.kind == pipeline::ActionKind::kUpdate;
    return is_update ? "" : std::to_string(read[{rank, action.micro_batch}]);
  };
  return schedules(
             "Forward and backward of a mini-batch read the same version of "
             "the "
             "weights\nThe first 8 mini-batches. In the boxes: the mini-batch. "
             "Below them: the version that is read. Every backward ends with "
             "an update.",
             {one})
      .svg;
}

std::vector<PageFigure> all() {
  return {{"chapters/06_1f1b/orders.svg", orders},
          {"chapters/06_1f1b/trade.svg", trade},
          {"chapters/06_1f1b/hidden.svg", hidden},
          {"chapters/06_1f1b/versions.svg", versions}};
}

}  // namespace shardbook::figures::page_06
