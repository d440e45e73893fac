#include "chapters/pictures/timeline_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <span>

#include "chapters/pictures/lanes.h"
#include "sim/timeline_text.h"

namespace shardbook::pictures {
namespace {

using sim::RankGroup;
using sim::StepView;

constexpr double kLaneBegin = 110, kLaneEnd = 700;
constexpr const char* kNoTime = "no virtual time was kept";

using Classes = std::vector<std::pair<std::string, std::string>>;

// The fullest sample of each of `num_columns` parts of the step; an earlier
// level holds until the next sample.
std::vector<sim::MemorySample> columns_of(const RankGroup& group, double step_s,
                                          std::size_t num_columns) {
  std::vector<sim::MemorySample> columns(num_columns);
  const std::vector<sim::MemorySample>& samples = group.timeline.memory;
  std::size_t next = 0;
  sim::MemorySample level;
  for (std::size_t c = 0; c < num_columns; ++c) {
    const double end = step_s * (c + 1) / num_columns;
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

// The kinds of memory that groups use, with their peaks.
std::vector<std::pair<std::string, double>> peaks_of(
    std::span<const RankGroup> groups) {
  std::vector<std::pair<std::string, double>> peaks;
  for (int k = 0; k < kNumMemoryKinds; ++k) {
    const double most = most_of(groups, [&](const RankGroup& group) {
      return most_of(group.timeline.memory,
                     [&](const auto& sample) { return sample.bytes[k]; });
    });
    if (most == 0) continue;
    peaks.emplace_back(memory_kind_name(static_cast<MemoryKind>(k)), most);
  }
  return peaks;
}

void draw_memory(Figure& figure, const RankGroup& group, double step_s,
                 double most, const Box& at) {
  constexpr std::size_t kColumns = 200;
  const auto columns = columns_of(group, step_s, kColumns);
  figure.box(at, "empty");
  // The sum of the kinds up to one of them is drawn over the larger sums
  for (int k = kNumMemoryKinds - 1; k >= 0; --k) {
    const auto bytes_of = [&](const auto& column) { return column.bytes[k]; };
    if (most_of(columns, bytes_of) == 0) continue;
    const auto y_of = [&](std::size_t c) {
      const auto kinds = columns[c].bytes.begin();
      const double sum = std::accumulate(kinds, kinds + k + 1, 0.0);
      return at.y + at.height * (1 - sum / most);
    };
    std::string path = fmt::format("M{} {}", px(at.x), px(y_of(0)));
    for (std::size_t c = 1; c < kColumns; ++c) {
      if (y_of(c) == y_of(c - 1)) continue;
      path += fmt::format("H{}V{}", px(at.x + at.width * c / kColumns),
                          px(y_of(c)));
    }
    path += fmt::format("H{}V{}H{}z", px(at.x + at.width), px(at.y + at.height),
                        px(at.x));
    figure.path(path, std::string("kind-") +
                          memory_kind_name(static_cast<MemoryKind>(k)));
  }
}

struct Shown {
  std::string name;
  StepView view;
};

std::vector<Shown> views_of(const std::vector<NamedTimelines>& runs) {
  std::vector<Shown> views;
  for (const NamedTimelines& run : runs) {
    if (run.timelines.empty()) continue;
    StepView view = sim::last_step(run.timelines);
    if (view.step_s > 0) views.push_back({run.name, std::move(view)});
  }
  return views;
}

// The groups of all runs, on the axis of the longest.
StepView all_of(const std::vector<Shown>& views) {
  StepView all;
  for (const Shown& one : views) {
    all.step_s = std::max(all.step_s, one.view.step_s);
    all.groups.insert(all.groups.end(), one.view.groups.begin(),
                      one.view.groups.end());
  }
  return all;
}

std::vector<std::string> legend_of(const Classes& classes) {
  std::vector<std::string> legend;
  for (const auto& [name, title] : classes)
    legend.push_back(name + ": " + title);
  return legend;
}

// Draws the groups of each run, and the axis.
std::string runs_svg(
    Figure& figure, Lanes& lanes, const std::vector<Shown>& views,
    int max_groups,
    const std::function<void(const RankGroup&, double step_s)>& draw) {
  double longest = 0;
  for (const auto& [name, view] : views) {
    const std::string time = sim::seconds_text(view.step_s);
    if (!name.empty()) figure.heading(name + ": " + time);
    figure.describe((name.empty() ? "A step" : name) + " takes " + time);
    const std::size_t shown =
        std::min<std::size_t>(view.groups.size(), max_groups);
    for (std::size_t g = 0; g < shown; ++g) draw(view.groups[g], view.step_s);
    const std::string hidden = sim::hidden_text(view, shown);
    if (!hidden.empty()) figure.text(0, figure.add_row(18) + 14, hidden + ".");
    longest = std::max(longest, view.step_s);
  }
  lanes.axis(seconds_unit(longest), "virtual time");
  return figure.svg();
}

std::string timelines_svg(const std::string& title,
                          const std::vector<Shown>& views, int max_groups) {
  const StepView all = all_of(views);
  Figure figure(title, kNotebookWidth);
  std::vector<std::string> legend = legend_of(classes_of(all));
  legend.emplace_back("empty: idle");
  figure.legend(legend);
  figure.end(figure.width(), figure.add_row(16) + 12, "busy", kMuted);
  Lanes lanes(figure, kLaneBegin, kLaneEnd, all.step_s);
  const auto draw = [&](const RankGroup& group, double step_s) {
    const std::string ranks = sim::rank_list(group.ranks);
    figure.text(0, figure.add_row(20) + 15, ranks);
    double computes = 0;
    for (const std::string& queue : sim::queue_names(group.timeline)) {
      const double height = queue == "compute" ? 20 : 12;
      const double y = figure.add_row(height + 3);
      const double busy = sim::queue_shares(group.timeline, queue, step_s).busy;
      if (queue == "compute") computes = busy;
      figure.text(0, y + height / 2 + 4, queue);
      lanes.draw(group.timeline, queue, step_s, y, height, true);
      figure.end(figure.width(), y + height / 2 + 4,
                 fmt::format("{:.0f} %", 100 * busy));
    }
    figure.describe(fmt::format("Compute is busy for {:.0f} % of it on {}",
                                100 * computes, ranks));
  };
  return runs_svg(figure, lanes, views, max_groups, draw);
}

// "ranks 0-3, at most 2.7 MiB: parameter 746 KiB activation 1.2 MiB"
std::string memory_line(const RankGroup& group) {
  std::string line = fmt::format("{}, at most {}:", sim::rank_list(group.ranks),
                                 format_bytes(memory_peak(group)));
  for (const auto& [kind, most] : peaks_of({&group, 1})) {
    line += " " + kind + " " + format_bytes(most);
  }
  return line;
}

std::string memories_svg(const std::string& title,
                         const std::vector<Shown>& views, int max_groups) {
  const StepView all = all_of(views);
  const double most = memory_peak(all);
  Figure figure(title, kNotebookWidth);
  figure.legend(legend_of(memory_classes_of(all)));
  Lanes lanes(figure, kLaneBegin, kLaneEnd, all.step_s);
  const auto draw = [&](const RankGroup& group, double step_s) {
    constexpr double kHeight = 90;
    const double y = figure.add_row(kHeight + 12) + 8;
    figure.text(0, y + 12, sim::rank_list(group.ranks));
    figure.text(0, y + 29, "at most");
    figure.text(0, y + 44, format_bytes(memory_peak(group)));
    draw_memory(figure, group, step_s, most,
                {kLaneBegin, y, lanes.pixels(step_s), kHeight});
    for (const double mark : round_marks(0, most, bytes_unit(most), 3)) {
      const double height = y + kHeight * (1 - mark / most);
      figure.line({{kLaneBegin, height}, {kLaneEnd, height}}, kPale);
      figure.text(kLaneEnd + 6, height + 4, round_text(mark, bytes_unit(most)),
                  kMuted);
    }
    figure.describe(memory_line(group));
  };
  return runs_svg(figure, lanes, views, most > 0 ? max_groups : 0, draw);
}

}  // namespace

Classes classes_of(const StepView& view) {
  std::set<std::string> used;
  for (const RankGroup& group : view.groups) {
    for (const sim::TimelineEvent& event : group.timeline.events) {
      used.insert(sim::class_of(event));
    }
  }
  Classes classes;
  for (const auto& [css_class, title] : sim::kEventClasses) {
    if (used.count(css_class) > 0) classes.emplace_back(css_class, title);
  }
  return classes;
}

Classes memory_classes_of(const StepView& view) {
  Classes classes;
  for (const auto& [kind, most] : peaks_of(view.groups)) {
    std::string name = kind;
    std::replace(name.begin(), name.end(), '_', ' ');
    classes.emplace_back("kind-" + kind, fmt::format("{}, at most {}", name,
                                                     format_bytes(most)));
  }
  return classes;
}

double memory_peak(const RankGroup& group) {
  return most_of(group.timeline.memory, &sim::MemorySample::total);
}

double memory_peak(const StepView& view) {
  return most_of(view.groups,
                 [](const RankGroup& group) { return memory_peak(group); });
}

Picture timelines(const std::string& title,
                  const std::vector<NamedTimelines>& runs, int max_groups) {
  const std::vector<Shown> views = views_of(runs);
  if (views.empty()) return {kNoTime};
  sim::TextStyle style;
  style.max_groups = static_cast<std::size_t>(max_groups);
  style.axis_s = all_of(views).step_s;
  std::string text;
  for (const NamedTimelines& run : runs) {
    if (run.timelines.empty()) continue;
    if (!run.name.empty()) text += run.name + "\n";
    text += sim::timeline_text(run.timelines, style);
  }
  return {text, timelines_svg(title, views, max_groups)};
}

Picture timeline(const std::string& title,
                 const std::vector<sim::RankTimeline>& timelines,
                 int max_groups) {
  return pictures::timelines(title, {{"", timelines}}, max_groups);
}

Picture memories(const std::string& title, std::vector<NamedTimelines> runs,
                 int max_groups) {
  for (NamedTimelines& run : runs) {
    // The scratch memory of kernels depends on the machine.
    for (sim::RankTimeline& timeline : run.timelines) {
      for (sim::MemorySample& sample : timeline.memory) {
        sample.bytes[static_cast<std::size_t>(MemoryKind::kWorkspace)] = 0;
      }
    }
  }
  const std::vector<Shown> views = views_of(runs);
  if (views.empty()) return {kNoTime};
  std::string text;
  for (const Shown& one : views) {
    if (!one.name.empty()) text += one.name + "\n";
    for (const RankGroup& group : one.view.groups) {
      text += memory_line(group) + "\n";
    }
  }
  return {text, memories_svg(title, views, max_groups)};
}

Picture memory(const std::string& title,
               const std::vector<sim::RankTimeline>& timelines,
               int max_groups) {
  return memories(title, {{"", timelines}}, max_groups);
}

}  // namespace shardbook::pictures
