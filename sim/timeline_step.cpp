#include "sim/timeline_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace shardbook::sim {
namespace {

struct Window {
  double begin_s = 0;
  double end_s = 0;
};

// All events and samples, when no rank counts steps.
Window whole_run(const std::vector<RankTimeline>& timelines) {
  Window window{std::numeric_limits<double>::infinity(), 0};
  for (const RankTimeline& rank : timelines) {
    for (const TimelineEvent& event : rank.events) {
      window.begin_s = std::min(window.begin_s, event.begin_s);
      window.end_s = std::max(window.end_s, event.end_s);
    }
  }
  return std::isinf(window.begin_s) ? Window{} : window;
}

// Step number `num_steps` of every rank: from the first begin to the last end.
Window find_window(const std::vector<RankTimeline>& timelines) {
  std::size_t marks = timelines.empty() ? 0 : timelines.front().steps.size();
  for (const RankTimeline& rank : timelines) {
    marks = std::min(marks, rank.steps.size());
  }
  if (marks < 2) return whole_run(timelines);
  Window window{std::numeric_limits<double>::infinity(), 0};
  for (const RankTimeline& rank : timelines) {
    window.begin_s = std::min(window.begin_s, rank.steps[marks - 2]);
    window.end_s = std::max(window.end_s, rank.steps[marks - 1]);
  }
  return window;
}

RankTimeline cut(const RankTimeline& rank, const Window& window) {
  const double length_s = window.end_s - window.begin_s;
  RankTimeline step;
  step.rank = rank.rank;
  step.steps = {0, length_s};
  for (const TimelineEvent& event : rank.events) {
    if (event.end_s <= window.begin_s || event.begin_s >= window.end_s) {
      continue;
    }
    step.events.push_back(event);
    TimelineEvent& kept = step.events.back();
    kept.begin_s = std::max(event.begin_s - window.begin_s, 0.0);
    kept.end_s = std::min(event.end_s - window.begin_s, length_s);
  }
  for (const MemorySample& sample : rank.memory) {
    // What happens at the end belongs to what follows.
    if (sample.time_s >= window.end_s) break;
    const double time_s = std::max(sample.time_s - window.begin_s, 0.0);
    // Of several samples at one time, the last is what stays.
    if (!step.memory.empty() && step.memory.back().time_s == time_s) {
      step.memory.back() = sample;
    } else {
      step.memory.push_back(sample);
    }
    step.memory.back().time_s = time_s;
  }
  return step;
}

bool alike(const RankTimeline& a, const RankTimeline& b, double tolerance_s) {
  const auto near = [&](double x, double y) {
    return std::abs(x - y) <= tolerance_s;
  };
  return std::equal(
             a.events.begin(), a.events.end(), b.events.begin(), b.events.end(),
             [&](const TimelineEvent& x, const TimelineEvent& y) {
               return near(x.begin_s, y.begin_s) && near(x.end_s, y.end_s) &&
                      x.bytes == y.bytes && x.flops == y.flops &&
                      x.name == y.name && x.queue == y.queue &&
                      x.category == y.category && x.label == y.label;
             }) &&
         std::equal(a.memory.begin(), a.memory.end(), b.memory.begin(),
                    b.memory.end(),
                    [&](const MemorySample& x, const MemorySample& y) {
                      return near(x.time_s, y.time_s) && x.bytes == y.bytes;
                    });
}

}  // namespace

StepView last_step(const std::vector<RankTimeline>& timelines) {
  const Window window = find_window(timelines);
  StepView view;
  view.world_size = static_cast<int>(timelines.size());
  view.step_s = window.end_s - window.begin_s;
  for (const RankTimeline& rank : timelines) {
    RankTimeline step = cut(rank, window);
    const auto same = std::find_if(
        view.groups.begin(), view.groups.end(), [&](const RankGroup& group) {
          return alike(group.timeline, step, 1e-6 * view.step_s);
        });
    if (same != view.groups.end()) {
      same->ranks.push_back(rank.rank);
    } else {
      view.groups.push_back({{rank.rank}, std::move(step)});
    }
  }
  return view;
}

std::vector<std::string> queue_names(const RankTimeline& timeline) {
  std::vector<std::string> names;
  for (const TimelineEvent& event : timeline.events) {
    if (std::find(names.begin(), names.end(), event.queue) == names.end()) {
      names.push_back(event.queue);
    }
  }
  std::stable_partition(names.begin(), names.end(),
                        [](const auto& name) { return name == "compute"; });
  return names;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (i > 0) text += ", ";
    text += fmt::format("{}", ranks[i]);
    if (end - i > 1) text += fmt::format("-{}", ranks[end - 1]);
    i = end;
  }
  return text;
}

double axis_distance(double length, int max_marks) {
  if (!(length > 0) || max_marks < 1) return 0;
  const double least = length / max_marks;
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least) return factor * power;
  }
  return 10 * power;
}

}  // namespace shardbook::sim
