#include "chapters/pictures/timeline_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "chapters/pictures/bytes.h"
#include "chapters/pictures/figure.h"
#include "sim/timeline_text.h"

namespace shardbook::pictures {
namespace {

using sim::RankGroup;
using sim::StepView;
using sim::TimelineEvent;

constexpr double kLaneBegin = 110, kLaneEnd = 710;
constexpr double kLaneWidth = kLaneEnd - kLaneBegin;

// Neighbours of one class too close to be told apart are merged into one block.
struct Block {
  double from = 0, to = 0;
  std::string label;  // of a micro-batch; empty for others
};
using Blocks = std::map<std::string, std::vector<Block>>;

// The forward or the backward of one micro-batch, pauses included.
struct Numbered {
  double from = 0, to = 0;
  std::string number, label, css_class;
};

struct Lane {
  Blocks blocks;
  std::vector<Numbered> numbers;
};

Lane lane_of(const sim::RankTimeline& timeline, const std::string& queue,
             double step_s) {
  Lane lane;
  for (const TimelineEvent& event : timeline.events) {
    if (event.queue != queue || event.category == "wait") continue;
    const double from = kLaneBegin + kLaneWidth * event.begin_s / step_s;
    const double to = kLaneBegin + kLaneWidth * event.end_s / step_s;
    const std::string number =
        sim::is_work(event) ? sim::micro_batch_of(event) : "";
    const std::string label = number.empty() ? "" : event.label;
    const std::string css_class = sim::class_of(event);
    std::vector<Block>& row = lane.blocks[css_class];
    if (!row.empty() && row.back().label == label &&
        from - row.back().to < 0.5) {
      row.back().to = std::max(row.back().to, to);
    } else {
      row.push_back({from, to, label});
    }
    if (number.empty()) continue;
    std::vector<Numbered>& all = lane.numbers;
    if (!all.empty() && all.back().label == label &&
        all.back().css_class == css_class) {
      all.back().to = std::max(all.back().to, to);
    } else {
      all.push_back({from, to, number, label, css_class});
    }
  }
  return lane;
}

void draw_lane(Figure& figure, const Lane& lane, double y, double height) {
  figure.box({kLaneBegin, y, kLaneWidth, height}, "empty");
  for (const auto& [css_class, row] : lane.blocks) {
    // Waiting is thin: nothing runs.
    const bool is_thin = css_class == "bubble" || css_class == "exposed";
    const double inset = is_thin ? height * 0.38 : 0;
    std::string path;
    for (const Block& block : row) {
      const double seam =
          !block.label.empty() && block.to - block.from > 3 ? 0.7 : 0;
      const double width = std::max(block.to - block.from - seam, 0.6);
      path += fmt::format("M{:.1f} {:.1f}h{:.1f}v{:.1f}h{:.1f}z", block.from,
                          y + inset, width, height - 2 * inset, -width);
    }
    figure.path(path, css_class);
  }
  for (const Numbered& each : lane.numbers) {
    const double room = 5 + 7 * static_cast<double>(each.number.size());
    if (each.to - each.from < room) continue;
    figure.text((each.from + each.to) / 2, y + height / 2 + 3.5, each.number,
                Figure::Anchor::kMiddle, 10, "#ffffff");
  }
}

void note_hidden(Figure& figure, const StepView& view, std::size_t num_shown) {
  const std::string hidden = sim::hidden_text(view, num_shown);
  if (!hidden.empty()) figure.text(0, figure.add_row(18) + 14, hidden + ".");
}

std::size_t num_groups(const StepView& view, int max_groups) {
  return std::min(view.groups.size(), static_cast<std::size_t>(max_groups));
}

// The fullest sample of each of `num_columns` parts of the step; an earlier
// level holds until the next sample.
std::vector<sim::MemorySample> columns_of(const RankGroup& group, double step_s,
                                          std::size_t num_columns) {
  std::vector<sim::MemorySample> columns(num_columns);
  const std::vector<sim::MemorySample>& samples = group.timeline.memory;
  std::size_t next = 0;
  sim::MemorySample level;
  for (std::size_t c = 0; c < num_columns; ++c) {
    const double end =
        step_s * static_cast<double>(c + 1) / static_cast<double>(num_columns);
    sim::MemorySample fullest = level;
    while (next < samples.size() &&
           (samples[next].time_s < end || c + 1 == num_columns)) {
      level = samples[next++];
      if (level.total() > fullest.total()) fullest = level;
    }
    columns[c] = fullest;
  }
  return columns;
}

std::int64_t most_of(const RankGroup& group, std::size_t kind) {
  std::int64_t most = 0;
  for (const sim::MemorySample& sample : group.timeline.memory) {
    most = std::max(most, sample.bytes[kind]);
  }
  return most;
}

void draw_memory(Figure& figure, const RankGroup& group, double step_s,
                 double most, double y, double height) {
  constexpr std::size_t kColumns = 200;
  const auto columns = columns_of(group, step_s, kColumns);
  constexpr double kColumn = kLaneWidth / static_cast<double>(kColumns);
  figure.box({kLaneBegin, y, kLaneWidth, height}, "empty");
  std::vector<double> below(kColumns, y + height);
  for (std::size_t k = 0; k < static_cast<std::size_t>(kNumMemoryKinds); ++k) {
    std::string top, bottom;
    bool any = false;
    std::vector<double> above = below;
    for (std::size_t c = 0; c < kColumns; ++c) {
      const auto bytes = static_cast<double>(columns[c].bytes[k]);
      any = any || bytes > 0;
      above[c] -= height * bytes / most;
      if (c == 0 || above[c] != above[c - 1]) {
        top += fmt::format("V{:.1f}", above[c]);
      }
      top += fmt::format("h{:.0f}", kColumn);
    }
    for (std::size_t c = kColumns; c-- > 0;) {
      if (c + 1 == kColumns || below[c] != below[c + 1]) {
        bottom += fmt::format("V{:.1f}", below[c]);
      }
      bottom += fmt::format("h{:.0f}", -kColumn);
    }
    if (any) {
      figure.path(
          fmt::format("M{:.1f} {:.1f}{}{}z", kLaneBegin, below[0], top, bottom),
          std::string("kind-") + memory_kind_name(static_cast<MemoryKind>(k)));
    }
    below = above;
  }
}

}  // namespace

std::vector<std::pair<std::string, std::string>> classes_of(
    const StepView& view) {
  std::set<std::string> used;
  for (const RankGroup& group : view.groups) {
    for (const TimelineEvent& event : group.timeline.events) {
      used.insert(sim::class_of(event));
    }
  }
  std::vector<std::pair<std::string, std::string>> classes;
  for (const auto& [css_class, title] : sim::kEventClasses) {
    if (used.count(css_class) > 0) classes.emplace_back(css_class, title);
  }
  return classes;
}

std::vector<std::pair<std::string, std::string>> memory_classes_of(
    const StepView& view) {
  std::vector<std::pair<std::string, std::string>> classes;
  for (std::size_t k = 0; k < static_cast<std::size_t>(kNumMemoryKinds); ++k) {
    std::int64_t most = 0;
    for (const RankGroup& group : view.groups) {
      most = std::max(most, most_of(group, k));
    }
    if (most == 0) continue;
    std::string name = memory_kind_name(static_cast<MemoryKind>(k));
    const std::string css_class = "kind-" + name;
    std::replace(name.begin(), name.end(), '_', ' ');
    classes.emplace_back(css_class,
                         fmt::format("{}, at most {}", name,
                                     format_bytes(static_cast<double>(most))));
  }
  return classes;
}

double memory_peak(const StepView& view) {
  double most = 0;
  for (const RankGroup& group : view.groups) {
    most = std::max(most, memory_peak(group));
  }
  return most;
}

double memory_peak(const RankGroup& group) {
  std::int64_t most = 0;
  for (const sim::MemorySample& sample : group.timeline.memory) {
    most = std::max(most, sample.total());
  }
  return static_cast<double>(most);
}

namespace {

std::string timeline_svg(const StepView& view, int max_groups) {
  Figure figure;
  figure.legend(classes_of(view));
  const std::size_t shown = num_groups(view, max_groups);
  for (std::size_t g = 0; g < shown; ++g) {
    const RankGroup& group = view.groups[g];
    figure.text(0, figure.add_row(20) + 15, sim::rank_list(group.ranks));
    for (const std::string& queue : sim::queue_names(group.timeline)) {
      const double height = queue == "compute" ? 20 : 10;
      const double y = figure.add_row(height + 3);
      figure.text(0, y + height / 2 + 4, queue, Figure::Anchor::kStart, 11);
      draw_lane(figure, lane_of(group.timeline, queue, view.step_s), y, height);
      const double busy =
          sim::queue_shares(group.timeline, queue, view.step_s).busy;
      figure.text(figure.width(), y + height / 2 + 4,
                  fmt::format("{:.0f} %", 100 * busy), Figure::Anchor::kEnd,
                  11);
    }
  }
  figure.axis(kLaneBegin, kLaneEnd, view.step_s, sim::seconds_text);
  note_hidden(figure, view, shown);
  return figure.svg("timeline of one step, " + sim::seconds_text(view.step_s));
}

std::string memory_svg(const StepView& view, int max_groups) {
  const double most = memory_peak(view);
  Figure figure;
  figure.legend(memory_classes_of(view));
  const std::size_t shown = most > 0 ? num_groups(view, max_groups) : 0;
  for (std::size_t g = 0; g < shown; ++g) {
    constexpr double kHeight = 90;
    const RankGroup& group = view.groups[g];
    const double y = figure.add_row(kHeight + 10) + 6;
    figure.text(0, y + 12, sim::rank_list(group.ranks));
    figure.text(0, y + 28, "at most", Figure::Anchor::kStart, 11);
    figure.text(0, y + 42, format_bytes(memory_peak(group)),
                Figure::Anchor::kStart, 11);
    draw_memory(figure, group, view.step_s, most, y, kHeight);
  }
  figure.axis(kLaneBegin, kLaneEnd, view.step_s, sim::seconds_text);
  note_hidden(figure, view, shown);
  return figure.svg("memory in use during one step, at most " +
                    format_bytes(most));
}

}  // namespace

Picture timeline(const std::vector<sim::RankTimeline>& timelines,
                 int max_groups) {
  if (timelines.empty()) return {"no virtual time was kept", "", ""};
  sim::TextStyle style;
  style.max_groups = static_cast<std::size_t>(max_groups);
  return {sim::timeline_text(timelines, style),
          timeline_svg(sim::last_step(timelines), max_groups), ""};
}

Picture memory(const std::vector<sim::RankTimeline>& timelines,
               int max_groups) {
  if (timelines.empty()) return {"no virtual time was kept", "", ""};
  // The scratch memory of kernels depends on the machine.
  std::vector<sim::RankTimeline> without_workspace = timelines;
  for (sim::RankTimeline& timeline : without_workspace) {
    for (sim::MemorySample& sample : timeline.memory) {
      sample.bytes[static_cast<std::size_t>(MemoryKind::kWorkspace)] = 0;
    }
  }
  const sim::StepView view = sim::last_step(without_workspace);
  Picture picture;
  for (const sim::RankGroup& group : view.groups) {
    picture.text += fmt::format("{}, at most {}:", sim::rank_list(group.ranks),
                                format_bytes(memory_peak(group)));
    for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
      const std::int64_t most = most_of(group, k);
      if (most == 0) continue;
      picture.text +=
          fmt::format(" {} {}", memory_kind_name(static_cast<MemoryKind>(k)),
                      format_bytes(static_cast<double>(most)));
    }
    picture.text += "\n";
  }
  picture.svg = memory_svg(view, max_groups);
  return picture;
}

}  // namespace shardbook::pictures
