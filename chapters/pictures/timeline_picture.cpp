#include "chapters/pictures/timeline_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
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

constexpr double kLaneBegin = 110, kLaneEnd = 700;
constexpr double kLaneWidth = kLaneEnd - kLaneBegin;
constexpr const char* kNoTime = "no virtual time was kept";

// Neighbours of one class too close to be told apart are merged into one block.
struct Block {
  double from = 0, to = 0;
  std::string label;  // of a micro-batch; empty for others
};
using Blocks = std::map<std::string, std::vector<Block>>;

// The forward or the backward of one micro-batch, pauses included.
struct Numbered {
  double from = 0, to = 0;
  double filled = 0;  // without the pauses
  std::string number, label, css_class;
};

struct Lane {
  Blocks blocks;
  std::vector<Numbered> numbers;
};

// `pixels` per second.
Lane lane_of(const sim::RankTimeline& timeline, const std::string& queue,
             double pixels) {
  Lane lane;
  for (const TimelineEvent& event : timeline.events) {
    if (event.queue != queue || event.category == "wait") continue;
    const double from = kLaneBegin + pixels * event.begin_s;
    const double to = kLaneBegin + pixels * event.end_s;
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
      all.back().filled += to - from;
    } else {
      all.push_back({from, to, to - from, number, label, css_class});
    }
  }
  return lane;
}

void draw_lane(Figure& figure, const Lane& lane, const Box& at) {
  figure.box(at, "empty");
  for (const auto& [css_class, row] : lane.blocks) {
    // Waiting is thin: nothing runs.
    const bool is_thin = css_class == "bubble" || css_class == "exposed";
    std::string path;
    for (const Block& block : row) {
      const double seam =
          !block.label.empty() && block.to - block.from > 3 ? 0.7 : 0;
      path += fmt::format("M{} {}h{}", px(block.from), px(at.y + at.height / 2),
                          px(std::max(block.to - block.from - seam, 0.6)));
    }
    figure.line(path, color_of(css_class), (is_thin ? 0.24 : 1) * at.height);
  }
  for (const Numbered& each : lane.numbers) {
    const double width = text_width(each.number) + 3;
    if (each.to - each.from < width) continue;
    const double x = (each.from + each.to) / 2;
    if (each.filled < 0.9 * (each.to - each.from)) {
      figure.box({x - width / 2, at.y + 3, width, at.height - 6},
                 each.css_class);
    }
    figure.middle(x, at.y + at.height / 2 + 4.5, each.number, "#ffffff");
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
                 double most, const Box& at) {
  constexpr std::size_t kColumns = 200;
  const auto columns = columns_of(group, step_s, kColumns);
  const auto x_of = [&](std::size_t column) {
    return at.x + at.width * static_cast<double>(column) / kColumns;
  };
  figure.box(at, "empty");
  std::vector<double> below(kColumns, at.y + at.height);
  for (std::size_t k = 0; k < static_cast<std::size_t>(kNumMemoryKinds); ++k) {
    std::string top, bottom;
    bool any = false;
    std::vector<double> above = below;
    for (std::size_t c = 0; c < kColumns; ++c) {
      const auto bytes = static_cast<double>(columns[c].bytes[k]);
      any = any || bytes > 0;
      above[c] -= at.height * bytes / most;
    }
    for (std::size_t c = 1; c < kColumns; ++c) {
      const std::size_t back = kColumns - c;
      if (above[c] != above[c - 1]) {
        top += fmt::format("H{}V{}", px(x_of(c)), px(above[c]));
      }
      if (below[back] != below[back - 1]) {
        bottom += fmt::format("H{}V{}", px(x_of(back)), px(below[back - 1]));
      }
    }
    if (any) {
      figure.path(
          fmt::format("M{0} {1}{3}H{2}V{4}{5}H{0}z", px(at.x),
                      px(above.front()), px(at.x + at.width), top,
                      px(below.back()), bottom),
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

// "FSDP takes 6.50 ms", or "A step takes 6.50 ms".
std::string time_of(const Shown& one) {
  return fmt::format("{} takes {}", one.name.empty() ? "A step" : one.name,
                     sim::seconds_text(one.view.step_s));
}

void add_name(Figure& figure, const Shown& one) {
  if (one.name.empty()) return;
  figure.heading(
      fmt::format("{}: {}", one.name, sim::seconds_text(one.view.step_s)));
}

// Draws the lanes of a group; returns how much of the step it computes.
double draw_group(Figure& figure, const RankGroup& group, double step_s,
                  double pixels) {
  double computes = 0;
  figure.text(0, figure.add_row(20) + 15, sim::rank_list(group.ranks));
  for (const std::string& queue : sim::queue_names(group.timeline)) {
    const double height = queue == "compute" ? 20 : 12;
    const double y = figure.add_row(height + 3);
    const double busy = sim::queue_shares(group.timeline, queue, step_s).busy;
    if (queue == "compute") computes = busy;
    figure.text(0, y + height / 2 + 4, queue);
    draw_lane(figure, lane_of(group.timeline, queue, pixels),
              {kLaneBegin, y, pixels * step_s, height});
    figure.end(figure.width(), y + height / 2 + 4,
               fmt::format("{:.0f} %", 100 * busy));
  }
  return computes;
}

// Draws the groups of each run, and the axis; `draw` returns what it drew.
std::string runs_svg(
    Figure& figure, const std::vector<Shown>& views, int max_groups,
    const std::function<std::string(const RankGroup&, double step_s)>& draw) {
  std::string details;
  for (const Shown& one : views) {
    add_name(figure, one);
    details += time_of(one) + ".";
    const std::size_t shown = num_groups(one.view, max_groups);
    for (std::size_t g = 0; g < shown; ++g) {
      details += draw(one.view.groups[g], one.view.step_s);
    }
    note_hidden(figure, one.view, shown);
    details += " ";
  }
  const double longest = all_of(views).step_s;
  figure.axis(kLaneBegin, kLaneEnd, longest, seconds_unit(longest),
              "virtual time");
  return figure.svg(details);
}

std::string timelines_svg(const std::string& title,
                          const std::vector<Shown>& views, int max_groups) {
  const StepView all = all_of(views);
  const double pixels = kLaneWidth / all.step_s;
  Figure figure(title, kNotebookWidth);
  auto legend = classes_of(all);
  legend.emplace_back("empty", "idle");
  figure.legend(legend);
  figure.end(figure.width(), figure.add_row(16) + 12, "busy", kMuted);
  return runs_svg(
      figure, views, max_groups, [&](const RankGroup& group, double step_s) {
        const double computes = draw_group(figure, group, step_s, pixels);
        return fmt::format(" Compute is busy for {:.0f} % of it on {}.",
                           100 * computes, sim::rank_list(group.ranks));
      });
}

// "ranks 0-3, at most 2.7 MiB: parameter 746 KiB activation 1.2 MiB"
std::string memory_line(const RankGroup& group) {
  std::string line = fmt::format("{}, at most {}:", sim::rank_list(group.ranks),
                                 format_bytes(memory_peak(group)));
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    const std::int64_t most = most_of(group, k);
    if (most == 0) continue;
    line += fmt::format(" {} {}", memory_kind_name(static_cast<MemoryKind>(k)),
                        format_bytes(static_cast<double>(most)));
  }
  return line;
}

std::string memories_svg(const std::string& title,
                         const std::vector<Shown>& views, int max_groups) {
  const StepView all = all_of(views);
  const double most = memory_peak(all);
  Figure figure(title, kNotebookWidth);
  figure.legend(memory_classes_of(all));
  return runs_svg(figure, views, most > 0 ? max_groups : 0,
                  [&](const RankGroup& group, double step_s) {
                    constexpr double kHeight = 90;
                    const Box at{kLaneBegin, figure.add_row(kHeight + 12) + 8,
                                 kLaneWidth * step_s / all.step_s, kHeight};
                    figure.text(0, at.y + 12, sim::rank_list(group.ranks));
                    figure.text(0, at.y + 29, "at most");
                    figure.text(0, at.y + 44, format_bytes(memory_peak(group)));
                    draw_memory(figure, group, step_s, most, at);
                    figure.lines_across({at.x, at.y, kLaneWidth, at.height}, 0,
                                        most, bytes_unit(most),
                                        /*is_right=*/true);
                    return " " + memory_line(group) + ".";
                  });
}

}  // namespace

Picture timelines(const std::string& title,
                  const std::vector<NamedTimelines>& runs, int max_groups) {
  const std::vector<Shown> views = views_of(runs);
  if (views.empty()) return {kNoTime, "", ""};
  sim::TextStyle style;
  style.max_groups = static_cast<std::size_t>(max_groups);
  style.axis_s = all_of(views).step_s;
  std::string text;
  for (const NamedTimelines& run : runs) {
    if (run.timelines.empty()) continue;
    if (!run.name.empty()) text += run.name + "\n";
    text += sim::timeline_text(run.timelines, style);
  }
  return {text, timelines_svg(title, views, max_groups), ""};
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
  if (views.empty()) return {kNoTime, "", ""};
  std::string text;
  for (const Shown& one : views) {
    if (!one.name.empty()) text += one.name + "\n";
    for (const RankGroup& group : one.view.groups) {
      text += memory_line(group) + "\n";
    }
  }
  return {text, memories_svg(title, views, max_groups), ""};
}

Picture memory(const std::string& title,
               const std::vector<sim::RankTimeline>& timelines,
               int max_groups) {
  return memories(title, {{"", timelines}}, max_groups);
}

}  // namespace shardbook::pictures
