// The engine: a config decides what the ranks do, and when they send.

#include <fmt/format.h>

#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/15_engine/prepared.h"
#include "chapters/15_engine/strategies.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/lanes.h"

namespace shardbook::figures::page_15 {

std::string line_of(const std::string& json, const std::string& options) {
  return "15_engine --config '" + json + "'" + options;
}

// What the three configs differ in.
std::string config_of(const std::string& lines) {
  return R"({"train_batch_size": 32, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
)" + lines +
         "}";
}

std::string configs() {
  constexpr double kLane = 15, kLine = 16;
  const std::vector<std::string> all = {
      "\"zero_optimization\":\n  {\"stage\": 2}",
      "\"pipeline\": {\"stages\": 4},\n\"gradient_accumulation_steps\": 8",
      "\"pipeline\": {\"stages\": 2},\n\"gradient_accumulation_steps\": 8,\n"
      "\"shardbook\":\n  {\"tensor_parallel\": {\"size\": 2}}"};
  Figure figure(
      "A few lines of the config choose what four devices do\n"
      "One step of GPT-2 medium with 32 samples of 1024 tokens in bf16, on "
      "simulated A100. A lane per device.",
      520);
  figure.legend({"forward", "backward", "optimizer: update",
                 "exposed: waits for a message", "bubble: waits for a stage"});
  std::vector<Report> runs;
  for (const std::string& lines : all) {
    runs.push_back(run_once(line_of(
        config_of(lines),
        on_shapes("dgx-a100", 4, "gpt2-medium", 32, 1024) + " --no-fold")));
  }
  Lanes lanes(figure, 215, figure.width(), most_of(runs, step_s));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double top = figure.add_row(4 * kLane + 26) + 12;
    double y = top;
    std::istringstream lines(all[i]);
    for (std::string line; std::getline(lines, line); y += kLine) {
      const std::size_t indent = line.find_first_not_of(' ');
      figure.text(8.0 * indent, y + 12, line.substr(indent));
    }
    const sim::StepView view = sim::last_step(runs[i].timelines);
    for (const sim::RankGroup& group : view.groups) {
      for (const int rank : group.ranks) {
        lanes.draw(group.timeline, "compute", view.step_s, top + kLane * rank,
                   kLane - 2);
      }
    }
    figure.describe(fmt::format("{:.0f} ms", 1e3 * view.step_s));
  }
  lanes.axis(kMilliseconds, "");
  return figure.svg();
}

// --- When gradients and parameters travel ------------------------------------

// Stage 3 keeps nothing, and stages 1 and 2 have one bucket.
std::string stage_config(int stage, double micro_batches) {
  return fmt::format(R"({{"gradient_accumulation_steps": {},
                          "zero_optimization": {{"stage": {}, {}}}}})",
                     micro_batches, stage,
                     stage == 3 ? R"("max_reuse_distance": 0)"
                                : R"("reduce_bucket_size": 2e9)");
}

// The queue of messages that works longest.
std::string network_of(const sim::RankTimeline& timeline, double step_s) {
  std::string longest;
  double most = 0;
  for (const std::string& queue : sim::queue_names(timeline)) {
    const double busy = sim::queue_shares(timeline, queue, step_s).busy;
    if (queue.rfind("comm", 0) != 0 || busy <= most) continue;
    longest = queue;
    most = busy;
  }
  return longest;
}

std::string contract() {
  Figure figure(
      "Stage 1 sends once, stage 2 per backward, stage 3 in every pass\n"
      "One step of GPT-2 with four micro-batches, on 8 ranks of the cluster "
      "textbook",
      520);
  figure.legend({"forward", "backward", "comm: reduces or gathers",
                 "exposed: waits for a message"});
  std::vector<Report> runs;
  for (int stage = 1; stage <= 3; ++stage) {
    runs.push_back(run_once(line_of(
        stage_config(stage, 4), on_shapes("textbook", 8, "gpt2", 64, 1024))));
  }
  Lanes lanes(figure, 60, figure.width(), most_of(runs, step_s));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const sim::RankTimeline step = first_rank(runs[i]);
    const double length = runs[i].time.step_s;
    figure.result(fmt::format("stage {}: {:.1f} ms", i + 1, 1e3 * length));
    lanes.queue("compute", step, "compute", length, 20);
    lanes.queue("network", step, network_of(step, length), length, 16);
  }
  lanes.axis(kMilliseconds);
  return figure.svg();
}

// --- Which stage for which number of micro-batches ---------------------------

constexpr int kRanks = 8;
constexpr std::int64_t kBatch = 320, kTokens = 175;

std::vector<Value> times_of(const std::function<std::string(double m)>& config,
                            const std::vector<double>& all) {
  return sweep(
      [&](double m) {
        return line_of(config(m), on_shapes("textbook", kRanks, "gpt2-xl",
                                            kBatch, kTokens));
      },
      all, step_s);
}

std::string pipeline_config(double m) {
  return fmt::format(R"({{"gradient_accumulation_steps": {}, "pipeline":
             {{"stages": 8, "partition": "parameters"}}}})",
                     m);
}

std::string choice() {
  constexpr double kElement = 4;
  // 2 bandwidth / (e rate) B s / (d - 1)
  const double limit = 2 * textbook::kBandwidth / (kElement * textbook::kRate) *
                       (kBatch * kTokens) / (kRanks - 1);
  const auto stage_times = [](int stage, const std::vector<double>& all) {
    return times_of([&](double m) { return stage_config(stage, m); }, all);
  };
  const auto zero1 = stage_times(1, {1, 40});
  const auto zero2 = stage_times(2, {1, 2, 4, 8, 10, 20});
  const auto zero3 = stage_times(3, {1, 2, 4, 5, 8, 10});
  const auto stages = times_of(pipeline_config, {5, 8, 10, 20, 40});
  Plot plot(
      "Accumulation makes ZeRO-3 slow and fills a pipeline\n"
      "GPT-2 XL in f32, 320 sequences of 175 tokens per step, on 8 ranks of "
      "the cluster textbook",
      {50, 400, 240, 520}, logarithmic("gradient_accumulation_steps", 1, 40),
      {"time of a step", 0, 2, kMilliseconds});
  plot.mark(limit, kBlue, fmt::format("inequality: {:.0f}", limit));
  plot.dotted_curve(zero2, kGold);
  plot.text(zero2.back().x, zero2.back().y, "ZeRO-2", kGold, {7, 0});
  plot.curve(zero1, kGreen, "ZeRO-1");
  plot.dotted_curve(stages, kOrange, "8 stages");
  plot.dotted_curve(zero3, kBlue);
  plot.text(zero3.back().x, zero3.back().y, "ZeRO-3, max_reuse_distance 0",
            kBlue, {7, 0});
  for (const Value& value : zero3) {
    plot.describe(
        fmt::format("ZeRO-3, {:g} steps: {:.0f} ms", value.x, 1e3 * value.y));
  }
  return plot.svg();
}

// --- Batches of a script for one process -------------------------------------

std::string deal() {
  constexpr int kProcesses = 4;
  constexpr std::size_t kSamples = 44, kSize = 4;
  constexpr double kBegin = 90, kColumn = 120, kRow = 26;
  std::vector<std::int64_t> samples(kSamples);
  std::iota(samples.begin(), samples.end(), 0);
  accelerate::ShardOptions options;
  options.batch_size = kSize;
  Figure figure(
      "The last round repeats the first samples, and is a window of its own\n"
      "44 samples in batches of 4, on 4 processes, with two batches per window",
      kBegin + 3 * kColumn + 10);
  figure.legend(
      {"forward: samples of a batch", "exposed: samples that come again"});
  const double top = figure.add_row(24);
  std::size_t rounds = 0;
  for (int rank = 0; rank < kProcesses; ++rank) {
    const double y = figure.add_row(kRow);
    figure.text(0, y + 16, fmt::format("process {}", rank));
    const auto batches =
        accelerate::shard_batches(samples, options, kProcesses, rank);
    rounds = batches.size();
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const bool is_again = (i * kProcesses + rank) * kSize >= kSamples;
      const double x = kBegin + kColumn * i;
      const std::string range =
          fmt::format("{} to {}", batches[i].front(), batches[i].back());
      figure.box({x, y + 1, kColumn - 12, kRow - 4},
                 is_again ? "exposed" : "forward", range);
      if (is_again) figure.describe("Process 3 reads " + range + " again");
    }
  }
  for (std::size_t i = 0; i < rounds; ++i) {
    figure.middle(kBegin + kColumn * i + (kColumn - 12) / 2, top + 16,
                  fmt::format("round {}", i + 1), kMuted);
  }
  const double bottom = figure.add_row(28);
  const auto window = [&](double from, double to, const std::string& text) {
    const double left = kBegin + kColumn * from;
    const double right = kBegin + kColumn * to - 12;
    figure.line({{left, bottom + 4}, {right, bottom + 4}}, kInk, 2);
    figure.middle((left + right) / 2, bottom + 20, text);
  };
  window(0, 2, "window 1: an update");
  window(2, 3, "window 2: counts half");
  return figure.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/15_engine/configs.svg", configs},
          {"chapters/15_engine/contract.svg", contract},
          {"chapters/15_engine/choice.svg", choice},
          {"chapters/15_engine/accelerate.svg", deal}};
}

}  // namespace shardbook::figures::page_15
