#include "chapters/table/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

namespace shardbook::table::svg {
namespace {

constexpr double kWidth = 1000;
constexpr double kLaneHeight = 16;
constexpr double kMemoryHeight = 100;
constexpr double kCurveHeight = 100;
constexpr double kNearest = 0.4;  // gaps below this cannot be seen
constexpr double kWide = 10;      // wide blocks stay apart
constexpr double kSeam = 0.8;     // between wide blocks that touch
constexpr double kNarrowest = 0.8;

std::string open(double height, const std::string& css_class,
                 const std::string& title, const std::string& attributes) {
  return fmt::format(
      "<svg class=\"{}\" viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\" "
      "role=\"img\" aria-label=\"{}\" {}>",
      css_class, kWidth, height, escape(title), attributes);
}

struct Block {
  double begin = 0;
  double end = 0;
};

// The blocks of each category on the x axis.
std::map<std::string, std::vector<Block>> blocks_of(
    const sim::RankTimeline& timeline, const std::string& queue,
    double step_s) {
  std::map<std::string, std::vector<Block>> blocks;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue != queue || event.category == "wait" ||
        event.category == "idle") {
      continue;
    }
    std::vector<Block>& row = blocks[category_class(event.category)];
    const double begin = kWidth * event.begin_s / step_s;
    const double end = kWidth * event.end_s / step_s;
    const bool near = !row.empty() && begin >= row.back().begin &&
                      begin - row.back().end < kNearest;
    const bool wide = !row.empty() && end - begin > kWide &&
                      row.back().end - row.back().begin > kWide;
    if (near && !wide) {
      row.back().end = std::max(row.back().end, end);
      continue;
    }
    if (near) row.back().end -= kSeam;
    row.push_back({begin, end});
  }
  return blocks;
}

std::string block_path(const std::vector<Block>& row) {
  std::string path;
  for (const Block& block : row) {
    const double width = std::max(block.end - block.begin, kNarrowest);
    path += fmt::format("M{:.1f} 0h{:.1f}v{}h{:.1f}z", block.begin, width,
                        kLaneHeight, -width);
  }
  return path;
}

double total(const sim::MemorySample& sample) {
  double sum = 0;
  for (const std::int64_t bytes : sample.bytes) {
    sum += static_cast<double>(bytes);
  }
  return sum;
}

// One sample per half unit of the x axis: the fullest.
std::vector<sim::MemorySample> thin(const std::vector<sim::MemorySample>& all,
                                    double step_s) {
  std::vector<sim::MemorySample> kept;
  double next_s = 0;
  for (const sim::MemorySample& sample : all) {
    if (kept.empty() || sample.time_s >= next_s) {
      kept.push_back(sample);
      next_s = sample.time_s + 0.5 / kWidth * step_s;
    } else if (total(sample) > total(kept.back())) {
      kept.back().bytes = sample.bytes;
    }
  }
  return kept;
}

// The area below the sum of the kinds 0 to `kind`.
std::string area_path(const std::vector<sim::MemorySample>& samples,
                      std::size_t kind, double step_s, double most_bytes) {
  std::string path = fmt::format("M0 {}", kMemoryHeight);
  std::string last;
  for (const sim::MemorySample& sample : samples) {
    double sum = 0;
    for (std::size_t k = 0; k <= kind; ++k) {
      sum += static_cast<double>(sample.bytes[k]);
    }
    const std::string height =
        fmt::format("V{:.1f}", kMemoryHeight * (1 - sum / most_bytes));
    if (height == last) continue;
    path += fmt::format("H{:.1f}", kWidth * sample.time_s / step_s) + height;
    last = height;
  }
  return path + fmt::format("H{}V{}z", kWidth, kMemoryHeight);
}

}  // namespace

std::string lane(const sim::RankTimeline& timeline, const std::string& queue,
                 double step_s, const std::string& title,
                 const std::string& attributes) {
  std::string text = open(kLaneHeight, "lane", title, attributes);
  for (const auto& [category, row] : blocks_of(timeline, queue, step_s)) {
    text +=
        fmt::format("<path class=\"{}\" d=\"{}\"/>", category, block_path(row));
  }
  return text + "</svg>";
}

std::string memory(const sim::RankTimeline& timeline, double step_s,
                   double most_bytes, const std::string& title,
                   const std::string& attributes) {
  std::string text = open(kMemoryHeight, "memory", title, attributes);
  const std::vector<sim::MemorySample> samples = thin(timeline.memory, step_s);
  // From the top down: each area covers the lower part of those before.
  for (std::size_t k = kNumMemoryKinds; k-- > 0;) {
    const bool used =
        std::any_of(samples.begin(), samples.end(),
                    [&](const auto& sample) { return sample.bytes[k] > 0; });
    if (!used || !(most_bytes > 0)) continue;
    text += fmt::format("<path class=\"kind-{}\" d=\"{}\"/>",
                        memory_kind_name(static_cast<MemoryKind>(k)),
                        area_path(samples, k, step_s, most_bytes));
  }
  return text + "</svg>";
}

std::string bar(double share, const std::string& css_class) {
  return fmt::format(
      "<svg class=\"bar\" viewBox=\"0 0 {0} 10\" preserveAspectRatio=\"none\" "
      "aria-hidden=\"true\"><rect class=\"{1}\" width=\"{2:.1f}\" "
      "height=\"10\"/></svg>",
      kWidth, css_class, kWidth * std::clamp(share, 0.0, 1.0));
}

std::string bar_with_error(double share, double deviation,
                           const std::string& css_class) {
  std::string text = bar(share, css_class);
  const double from = kWidth * std::clamp(share - deviation, 0.0, 1.0);
  const double to = kWidth * std::clamp(share + deviation, 0.0, 1.0);
  text.insert(text.rfind("</svg>"),
              fmt::format("<path class=\"error\" d=\"M{0:.1f} 5H{1:.1f}"
                          "M{0:.1f} 2V8M{1:.1f} 2V8\"/>",
                          from, to));
  return text;
}

std::string curve(const std::vector<Point>& points, double solid,
                  double dashed, const std::string& title) {
  const auto at = [](double y) { return kCurveHeight * (1 - y); };
  std::string line, errors;
  for (const Point& point : points) {
    const double x = kWidth * point.x;
    line += fmt::format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L", x,
                        at(point.y));
    errors += fmt::format("M{:.1f} {:.1f}V{:.1f}", x,
                          at(point.y - point.deviation),
                          at(point.y + point.deviation));
  }
  return open(kCurveHeight, "curve", title, "") +
         fmt::format("<path class=\"solid\" d=\"M0 {0:.1f}H{1}\"/>"
                     "<path class=\"dashed\" d=\"M0 {2:.1f}H{1}\"/>"
                     "<path class=\"error\" d=\"{3}\"/>"
                     "<path class=\"line\" d=\"{4}\"/></svg>",
                     at(solid), kWidth, at(dashed), errors, line);
}

std::string escape(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

std::string category_class(const std::string& category) {
  static constexpr std::array<const char*, 5> kKnown = {
      "forward", "backward", "optimizer", "comm", "copy"};
  const bool known =
      std::find(kKnown.begin(), kKnown.end(), category) != kKnown.end();
  return known ? category : "other";
}

}  // namespace shardbook::table::svg
