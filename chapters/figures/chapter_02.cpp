// DDP: buckets, and when they hide.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/lanes.h"

namespace shardbook::figures::page_02 {

constexpr double kMs = 1e-3, kMiB = 1 << 20;

std::string buckets_of(double first_mb, double other_mb) {
  return fmt::format(" --first-bucket-mb {} --bucket-mb {}", first_mb,
                     other_mb);
}

Report gpt2_on_textbook(const std::string& buckets = "") {
  return run_once("02_ddp" + on_shapes("textbook", 8, "gpt2", 16, 1024) +
                  buckets);
}

std::string buckets() {
  const Report report = gpt2_on_textbook();
  const sim::RankTimeline step = first_rank(report);
  // Times count from the begin of backward
  double begin = 1, end = 0;
  for (const sim::TimelineEvent& event : step.events) {
    if (event.category != "backward") continue;
    begin = std::min(begin, event.begin_s);
    end = std::max(end, event.end_s);
  }
  std::vector<sim::TimelineEvent> messages;
  for (sim::TimelineEvent event : step.events) {
    if (event.label.rfind("bucket ", 0) != 0) continue;
    event.begin_s -= begin;
    event.end_s -= begin;
    messages.push_back(event);
  }
  end -= begin;

  constexpr double kBegin = 150, kLength = 15 * kMs, kRow = 17;
  Figure figure(
      "Each block's bucket travels while the next block is computed\n"
      "The 13 buckets of GPT-2's gradients, in the order in which they leave");
  Lanes lanes(figure, kBegin, figure.width() - 10, kLength);
  figure.legend({"backward: its gradients are computed", "comm: it travels"});
  const double top = figure.add_row(18);
  figure.middle(lanes.x(end), top + 13, "backward ends");
  double before = 0;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const sim::TimelineEvent& message = messages[i];
    const double y = figure.add_row(kRow);
    // A ring sends 2 (d - 1) / d of each byte
    const double bytes = message.bytes * 8 / 14;
    figure.text(0, y + 13, fmt::format("bucket {}", i));
    figure.end(kBegin - 12, y + 13, fmt::format("{:.0f} MiB", bytes / kMiB));
    if (i + 1 == messages.size()) {
      figure.end(lanes.x(before) - 8, y + 13, "token table, block 0");
    }
    const double full = std::min(message.begin_s, end);
    lanes.bar(before, full, y, kRow, 5, "backward");
    lanes.bar(message.begin_s, message.end_s, y, kRow, kRow - 4, "comm");
    before = full;
  }
  const double arrived = messages.back().end_s;
  const double bottom = figure.add_row(22);
  const double left = lanes.x(end), right = lanes.x(arrived);
  figure.line({{left, top + 18}, {left, bottom}}, kInk, 1, "4 3");
  figure.line({{left, bottom + 3}, {right, bottom + 3}}, "exposed", 3);
  figure.middle((left + right) / 2, bottom + 18,
                fmt::format("exposed: {:.2f} ms", exposed_s(report) / kMs),
                "exposed");
  lanes.axis({"ms", kMs}, "since backward began");
  return figure.svg(fmt::format(
      "Backward ends after {:.2f} ms, the last bucket arrives after {:.2f} ms.",
      end / kMs, arrived / kMs));
}

std::string overlap() {
  const std::vector<std::pair<const char*, std::string>> ways = {
      {"one message", buckets_of(1000, 1000)},
      {"a message per tensor", buckets_of(1e-6, 1e-6)},
      {"buckets of 25 MiB", ""}};
  Figure figure(
      "Buckets hide most of the all-reduce; one message and 148 messages do "
      "not\nOne step of GPT-2 on 8 ranks");
  Lanes lanes(figure, 70, figure.width() - 10, 28 * kMs);
  figure.legend({"forward", "backward", "comm: all-reduce",
                 "exposed: exposed: waits for the network", "empty: idle"});
  const double top = figure.add_row(6);
  double computing = 0;
  for (const auto& [way, buckets] : ways) {
    const Report report = gpt2_on_textbook(buckets);
    const sim::RankTimeline step = first_rank(report);
    const double length = report.time.step_s, exposed = exposed_s(report);
    computing = length * sim::queue_shares(step, "compute", length).busy;
    figure.result(fmt::format("{}: {:.1f} ms, of which {:.3g} ms exposed", way,
                              length / kMs, exposed / kMs));
    lanes.queue("compute", step, "compute", length, 22);
    if (way == ways[1].first) {
      figure.end(figure.width(), figure.add_row(0) - 32,
                 "thin orange lines: a mean is copied back");
    }
    lanes.queue("network", step, "comm world", length, 16);
    for (const sim::TimelineEvent& event : step.events) {
      if (event.queue != "comm world") continue;
      figure.text(lanes.x(event.end_s) + 4, figure.add_row(0) - 6, "the loss");
      break;  // it is the first message
    }
  }
  const double bottom = figure.add_row(22);
  const double x = lanes.x(computing);
  figure.line({{x, top}, {x, bottom + 4}}, kInk, 1, "4 3");
  figure.middle(x, bottom + 16,
                fmt::format("computing alone: {:.1f} ms", computing / kMs));
  lanes.axis({"ms", kMs});
  return figure.svg();
}

// Exposed communication as a share of the step, by tokens per rank.
std::vector<Value> exposed_shares(const char* cluster, int ranks,
                                  const char* model, int seq,
                                  const std::vector<double>& samples,
                                  const std::string& options) {
  return sweep(
      [&](double each) {
        return "02_ddp" + on_shapes(cluster, ranks, model, ranks * each, seq) +
               options;
      },
      samples, exposed_share, seq);
}

std::string threshold() {
  // (d - 1) / d e rate / (2 bandwidth)
  const double textbook_tokens =
      7.0 / 8 * 4 * textbook::kRate / (2 * textbook::kBandwidth);
  const sim::Cluster a100 = sim::Cluster::read("dgx-a100");
  const double a100_tokens =
      63.0 / 64 * 2 * a100.device.peak_flops.at(DType::kBF16) /
      (2 * a100.nics_per_node * a100.network.bytes_per_s);
  const auto on_textbook =
      exposed_shares("textbook", 8, "gpt2-xl", 250,
                     {1, 2, 4, 5, 6, 7, 8, 9, 12, 16}, buckets_of(1, 100));
  const auto on_a100 =
      exposed_shares("dgx-a100", 64, "gpt-1.3b", 256, {1, 2, 3, 4, 5, 6, 7, 8},
                     buckets_of(1, 25) + " --dtype bf16");

  Plot plot("Above the marked tokens per device, gradients travel for free",
            {50, 575, 240},
            logarithmic("tokens per device and step", 250, 4000),
            {"exposed communication, share of the step", 0, 1, kPercent});
  plot.mark(textbook_tokens, kBlue,
            fmt::format("inequality: {:.0f}", textbook_tokens));
  plot.mark(a100_tokens, kOrange, "", 30);
  plot.end(a100_tokens / 1.02, 0.82,
           fmt::format("inequality: {:.0f}", a100_tokens), kOrange);
  plot.curve(on_textbook, kBlue);
  plot.text(540, 0.64, "GPT-2 XL, f32, 8 ranks of textbook", kBlue);
  plot.text(2050, 0.07, "the last bucket", kBlue);
  plot.curve(on_a100, kOrange);
  plot.text(260, 0.25, "GPT 1.3B, bf16, 64 A100", kOrange);
  return plot.svg(fmt::format(
      "GPT-2 XL on 8 ranks falls from {:.0f} % at {:.0f} tokens to {:.0f} % at "
      "{:.0f}. GPT 1.3B on 64 A100 falls from {:.0f} % to {:.0f} %.",
      100 * on_textbook.front().y, on_textbook.front().x,
      100 * on_textbook.back().y, on_textbook.back().x, 100 * on_a100.front().y,
      100 * on_a100.back().y));
}

// The loss after each step, over the samples seen. One device has DDP's losses,
// and takes a quarter of the time of four ranks on two cores.
std::vector<Value> losses(std::int64_t batch, std::int64_t steps, double rate) {
  const Report report = run_once(fmt::format(
      "00_single_device --model gpt-nano --data walk --dtype f64 --cluster "
      "none --seq 64 --optimizer sgd --no-check --batch {} --steps {} --lr {}",
      batch, steps, rate));
  std::vector<Value> all;
  for (const double loss : report.losses) {
    all.push_back({static_cast<double>(batch) * all.size(), loss});
  }
  return all;
}

std::string rates() {
  Plot plot("Four times the samples per step want four times the learning rate",
            {50, 380, 240}, {"samples seen", 0, 640}, {"loss", 4, 5.6});
  const auto add = [&](const std::vector<Value>& values, const Stroke& stroke,
                       const std::string& name) {
    plot.curve(values, stroke,
               fmt::format("{:.2f}: {}", values.back().y, name));
  };
  add(losses(8, 80, 0.01), kBlue, "8 per step, rate 0.01");
  add(losses(32, 20, 0.01), kOrange, "32 per step, rate 0.01");
  add(losses(32, 20, 0.04), kGreen, "32 per step, rate 0.04");
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/02_ddp/buckets.svg", buckets},
          {"chapters/02_ddp/overlap.svg", overlap},
          {"chapters/02_ddp/threshold.svg", threshold},
          {"chapters/02_ddp/rates.svg", rates}};
}

}  // namespace shardbook::figures::page_02
