// DataParallel: everything passes through the main device.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/lanes.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/layers.h"

namespace shardbook::figures::page_01 {

constexpr double kMs = 1e-3, kGB = 1e9, kGiB = 1 << 30;
// GPT-2 in f32
constexpr double kParameters = 124439808, kVocabulary = 50257, kBytes = 4;

// GPT-2 with samples of 1024 tokens.
std::string on_textbook(int devices, std::int64_t batch) {
  return on_shapes("textbook", devices, "gpt2", batch, 1024);
}

double seconds(int devices, std::int64_t batch) {
  return step_s(run_once("01_data_parallel" + on_textbook(devices, batch)));
}

// --- The nine steps ---------------------------------------------------------

// Elements of one copy: to each other device, or from each of them.
struct Copy {
  std::int64_t elements = 0;
  bool is_to_main = false;
};

// The copies of the toy's first batch, with the input on device 0.
std::vector<Copy> copies_of_toy() {
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1),
                                       Device::cpu(2)};
  RankContext context(devices[0]);
  const RankContext::Scope scope(context);
  Linear model("fc", 5, 2, InitOptions());
  data_parallel::DataParallel net(model, devices);
  mean(square(net(Tensor::full({30, 5}, 1)))).backward();
  const auto main = net.ledger()->records(devices[0]);
  const auto other = net.ledger()->records(devices[1]);
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < main.size(); ++i) {
    const bool is_to_main = main[i].numel_to_peers == 0;
    copies.push_back(
        {is_to_main ? other[i].numel_to_peers : main[i].numel_to_peers / 2,
         is_to_main});
  }
  return copies;
}

std::string nine_steps() {
  constexpr double kRow = 32, kBox = 22, kWidth = 110, kMain = 336;
  constexpr double kLefts[] = {kMain - 180, kMain, kMain + 180};
  struct Row {
    std::string name, main, others;  // texts
    std::string css_class;           // empty: a copy
  };
  const std::vector<Row> rows = {
      {"1 scatter the input", "x: 30 rows", "x: 10 rows", ""},
      {"2 replicate the model", "weights", "replica", ""},
      {"3 forward", "y = model(x)", "y = model(x)", "forward"},
      {"4 gather the outputs", "y: 30 rows", "y: 10 rows", ""},
      {"5 loss", "loss(y)", "", "forward"},
      {"6 scatter dy", "dy: 30 rows", "dy: 10 rows", ""},
      {"7 backward", "gradients", "gradients", "backward"},
      {"8 add up the gradients", "sum of three", "gradients", ""},
      {"9 update", "weights", "", "optimizer"}};
  const std::vector<Copy> copies = copies_of_toy();
  Figure figure(
      "Every copy begins or ends on device 0\n"
      "One step of a linear layer from 5 to 2, 30 rows on 3 devices; numbers "
      "at arrows are elements");
  const double top = figure.add_row(20);
  const char* const names[] = {"device 1", "device 0 (main)", "device 2"};
  for (int i = 0; i < 3; ++i) {
    figure.middle(kLefts[i] + kWidth / 2, top + 14, names[i], kMuted);
  }
  std::size_t num_copies = 0;
  for (const Row& row : rows) {
    const double y = figure.add_row(kRow) + (kRow - kBox) / 2;
    const double middle = y + kBox / 2;
    figure.text(0, middle + 4, row.name);
    for (int i = 0; i < 3; ++i) {
      const std::string& text = i == 1 ? row.main : row.others;
      const Box box = {kLefts[i], y, kWidth, kBox};
      if (row.css_class.empty()) {
        figure.framed_box(box, kWhite, kMuted, text);
      } else if (text.empty()) {
        figure.box(box, "empty", "idle", kMuted);
      } else {
        figure.box(box, row.css_class, text);
      }
    }
    if (!row.css_class.empty()) continue;
    const Copy& copy = copies.at(num_copies++);
    for (const double side : {-1.0, 1.0}) {
      const double inner = kMain + kWidth / 2 + side * (kWidth / 2 + 5);
      const double outer = inner + side * 60;
      figure.arrow({copy.is_to_main ? outer : inner, middle},
                   {copy.is_to_main ? inner : outer, middle}, "copy");
      figure.middle((inner + outer) / 2, middle - 5,
                    std::to_string(copy.elements));
    }
    figure.describe(fmt::format("{}: {} elements {} each other device",
                                row.name, copy.elements,
                                copy.is_to_main ? "from" : "to"));
  }
  return figure.svg();
}

// --- Runs -------------------------------------------------------------------

// 24 samples suit 2, 3, 4, 6 and 8 devices.
std::string on_gpus(int devices) {
  return on_shapes("dgx-v100", devices, "gpt2", 24, 512);
}

std::string step() {
  const Report report = run_once("01_data_parallel" + on_gpus(4));
  const sim::StepView view = sim::last_step(report.timelines);
  Figure figure(
      "Device 0 is always busy, and the others wait for it\n"
      "One step of GPT-2 on 4 V100");
  figure.legend({"forward", "backward", "optimizer: update",
                 "copy: copies (thin: waits)", "empty: idle"});
  figure.end(figure.width(), figure.add_row(18) + 13, "busy", kMuted);
  Lanes lanes(figure, 80, 560, view.step_s);
  for (const sim::RankGroup& group : view.groups) {
    for (const int device : group.ranks) {
      const double busy =
          sim::queue_shares(group.timeline, "compute", view.step_s).busy;
      const double y = lanes.queue(fmt::format("device {}", device),
                                   group.timeline, "compute", view.step_s, 22);
      figure.add_row(2);
      figure.end(figure.width(), y + 15, fmt::format("{:.0f} %", 100 * busy));
      figure.describe(
          fmt::format("Device {} is busy for {:.0f} %", device, 100 * busy));
    }
  }
  lanes.axis({"ms", kMs});
  return figure.svg();
}

std::string hot_spot() {
  std::vector<Value> main, other, ring;
  for (const int d : {2, 3, 4, 6, 8}) {
    const Report report = run_once("01_data_parallel" + on_gpus(d));
    const Report ddp = run_once("02_ddp" + on_gpus(d));
    const double x = d;
    main.push_back({x, report.ranks.front().bytes.counted / kSteps});
    other.push_back({x, report.ranks.back().bytes.counted / kSteps});
    // Without DDP's first weights, which it sends once
    const double weights = (x - 1) / x * kBytes * kParameters;
    ring.push_back({x, (ddp.ranks.front().bytes.counted - weights) / kSteps});
  }
  Plot plot(
      "Device 0 sends more with every device, a rank of a ring hardly more\n"
      "Bytes that leave a device in one step of GPT-2, 24 samples of 512 "
      "tokens",
      {50, 400, 220}, marked("devices d", {2, 3, 4, 5, 6, 7, 8}),
      {"sent per step", 0, 6 * kGB, {"GB", kGB}});
  plot.curve(main, kOrange, "device 0");
  plot.curve(ring, kGreen, "a rank of a ring (DDP)");
  plot.curve(other, kBlue, "another device");
  return plot.svg();
}

// --- When it pays -----------------------------------------------------------

// 2 e parameters / (bandwidth token_s - 2 e vocabulary)
double tokens_that_pay() {
  const double token_s = seconds(1, 1) / 1024;
  return 2 * kBytes * kParameters /
         (textbook::kBandwidth * token_s - 2 * kBytes * kVocabulary);
}

std::string threshold() {
  const double tokens = tokens_that_pay();
  Plot plot(
      "Above about 2500 tokens per device, DataParallel is faster than one "
      "device\n"
      "GPT-2 in f32 on the cluster textbook",
      {50, 480, 240}, logarithmic("tokens per device and step", 1024, 16384),
      marked("speed-up over one device, same batch", {0, 0.5, 1, 1.5, 2}));
  plot.across(1);
  plot.text(16384, 1, "one device", kBlack, {6, 4});
  for (const auto& [devices, stroke] :
       {std::pair(2, kBlue), std::pair(4, kOrange), std::pair(8, kGreen)}) {
    std::vector<Value> speedups;
    for (const int samples : {1, 2, 3, 4, 6, 8, 12, 16}) {
      const std::int64_t batch = samples * devices;
      speedups.push_back(
          {1024.0 * samples, seconds(1, batch) / seconds(devices, batch)});
    }
    plot.curve(speedups, stroke, fmt::format("{} devices", devices));
  }
  plot.mark(tokens, kPurple, fmt::format("inequality: {:.0f}", tokens));
  return plot.svg();
}

std::string devices() {
  constexpr std::int64_t kBatch = 24;
  const double ratio = 1024 * kBatch / tokens_that_pay();
  const double one = seconds(1, kBatch);
  const std::vector<double> counts = {1, 2, 3, 4, 6, 8, 12, 24};
  Plot plot(
      fmt::format("With 24 samples, three devices are fastest; from {:.0f} on, "
                  "one device is faster\n"
                  "GPT-2 in f32 on the cluster textbook",
                  ratio),
      {50, 460, 240}, logarithmic("devices d", 1, 24, counts),
      {"time of a step", 0, 350 * kMs, {"ms", kMs}});
  const auto data_parallel = sweep("01_data_parallel" + on_textbook(1, kBatch),
                                   "--world-size", counts, step_s);
  const auto ddp =
      sweep("02_ddp" + on_textbook(1, kBatch), "--world-size", counts, step_s);
  plot.across(one);
  plot.text(24, one, "one device", kBlack, {6, 4});
  plot.mark(std::sqrt(ratio), kPurple,
            fmt::format("fastest: √{:.1f} = {:.1f}", ratio, std::sqrt(ratio)));
  plot.mark(ratio, kPurple, fmt::format("equal: {:.1f}", ratio), 40);
  plot.dotted_curve(data_parallel, kOrange, "DataParallel");
  plot.curve(ddp, kGreen, "DDP");
  return plot.svg();
}

// --- Memory -----------------------------------------------------------------

std::string memory() {
  constexpr double kBegin = 80, kMost = 11 * kGiB;
  const Report report = run_once("01_data_parallel" + on_textbook(4, 16));
  const sim::StepView view = sim::last_step(report.timelines);
  // In the order of MemoryKind
  const std::vector<std::string> kinds = {
      "kind-parameter: parameters", "kind-gradient: gradients",
      "kind-optimizer_state: optimizer state", "kind-activation: activations"};
  std::vector<sim::MemorySample> fullest;
  for (const sim::RankGroup& group : view.groups) {
    fullest.push_back(
        std::ranges::max(group.timeline.memory, {}, &sim::MemorySample::total));
  }
  Figure figure(
      fmt::format("Device 0 needs {:.1f} times the memory of another\n"
                  "The fullest moment of a step: GPT-2, 16 samples of 1024 "
                  "tokens on 4 devices",
                  1.0 * fullest.front().total() / fullest.back().total()));
  figure.legend(kinds);
  const double pixels = (figure.width() - kBegin - 10) / kMost;
  for (std::size_t i = 0; i < view.groups.size(); ++i) {
    const double y = figure.add_row(30) + 4;
    const std::string name = fmt::format("device {}", view.groups[i].ranks[0]);
    figure.text(0, y + 16, name);
    std::vector<std::pair<double, std::string>> parts;
    for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
      const double bytes = fullest[i].bytes[kind];
      const std::string color = kinds[kind].substr(0, kinds[kind].find(':'));
      if (bytes > 0) parts.emplace_back(pixels * bytes, color);
    }
    const double x = figure.stack({kBegin, y, 0, 22}, parts);
    if (i == 0) {
      // In the middle of the loss's backward, both are there
      const double logits = 2 * 16 * 1024 * kVocabulary * kBytes;
      const double begin = x - pixels * logits;
      figure.line({{begin, y}, {begin, y + 22}}, kWhite, 2);
      figure.middle(
          (begin + x) / 2, y + 15,
          fmt::format("logits and their gradient: {:.1f} GiB", logits / kGiB),
          kWhite);
    }
    const std::string size =
        fmt::format("{:.1f} GiB", fullest[i].total() / kGiB);
    figure.text(x + 6, y + 16, size);
    figure.describe(fmt::format("{}: {}", name, size));
  }
  figure.axis(kBegin, kBegin + pixels * kMost, kMost, {"GiB", kGiB}, "in use");
  return figure.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/01_data_parallel/nine_steps.svg", nine_steps},
          {"chapters/01_data_parallel/step.svg", step},
          {"chapters/01_data_parallel/hot_spot.svg", hot_spot},
          {"chapters/01_data_parallel/threshold.svg", threshold},
          {"chapters/01_data_parallel/devices.svg", devices},
          {"chapters/01_data_parallel/memory.svg", memory}};
}

}  // namespace shardbook::figures::page_01
