#include "sim/timeline_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace shardbook::sim {
namespace {

struct Window {
  double begin_s = 0;
  double end_s = 0;
  int num_steps = 1;
  /// The entry of a rank's steps that is shown, by rank.
  std::vector<std::size_t> steps = {};
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

bool computes(const TimelineEvent& event) {
  return event.queue == "compute" && is_work(event);
}

// The last step of a rank that begins a forward; the very last where none does.
std::size_t last_forward_step(const RankTimeline& rank) {
  const std::size_t num_steps = rank.steps.size() - 1;
  const auto begins_forward = [&](std::size_t step) {
    return std::any_of(
        rank.events.begin(), rank.events.end(), [&](const auto& event) {
          return computes(event) && event.category == "forward" &&
                 event.begin_s >= rank.steps[step] &&
                 event.begin_s < rank.steps[step + 1];
        });
  };
  for (std::size_t step = num_steps; step-- > 0;) {
    if (begins_forward(step)) return step;
  }
  return num_steps - 1;
}

// An entry of a rank's steps, counted from the begin of the run.
std::int64_t number_of(const RankTimeline& rank, std::size_t step) {
  const bool is_behind = rank.num_left_out > 0 && step > rank.first_left_out;
  return static_cast<std::int64_t>(step) +
         (is_behind ? rank.num_left_out - 1 : 0);
}

// When a rank first computes in a step.
double first_work_s(const RankTimeline& rank, std::size_t step) {
  double first_s = rank.steps[step + 1];
  for (const TimelineEvent& event : rank.events) {
    if (computes(event) && event.begin_s >= rank.steps[step]) {
      first_s = std::min(first_s, event.begin_s);
    }
  }
  return first_s;
}

// The same step of ranks that end it together, or one after the other.
Window flushing_window(const std::vector<RankTimeline>& timelines,
                       const std::vector<std::size_t>& steps) {
  double first_work = std::numeric_limits<double>::infinity();
  double last_begin = 0, last_end = 0;
  for (std::size_t r = 0; r < timelines.size(); ++r) {
    const std::vector<double>& marks = timelines[r].steps;
    first_work = std::min(first_work, first_work_s(timelines[r], steps[r]));
    last_begin = std::max(last_begin, marks[steps[r]]);
    last_end = std::max(last_end, marks[steps[r] + 1]);
  }
  Window window{std::min(first_work, last_begin), last_end};
  window.steps = steps;
  return window;
}

// Whether the r-th rank does this in the step that the window shows, and not in
// the step before or after.
bool belongs(const TimelineEvent& event, const RankTimeline& rank,
             std::size_t r, const Window& window) {
  if (window.steps.empty() || !is_work(event)) return true;
  const double begin_s = rank.steps[window.steps[r]];
  const double end_s = rank.steps[window.steps[r] + 1];
  // A message may have been sent before its receiver was ready for it.
  const double from_s = event.category == "comm" ? event.end_s : event.begin_s;
  return from_s >= begin_s && event.begin_s < end_s;
}

// Up to four steps after all ranks have filled and before the first one drains.
Window steady_window(const std::vector<RankTimeline>& timelines,
                     const std::vector<std::size_t>& steps) {
  constexpr int kMostSteps = 4;
  Window window{0, std::numeric_limits<double>::infinity(), 1};
  double filled_s = 0;
  for (std::size_t r = 0; r < timelines.size(); ++r) {
    const std::vector<double>& marks = timelines[r].steps;
    const bool is_whole = timelines[r].num_left_out == 0;
    filled_s = std::max(filled_s,
                        marks[is_whole ? 1 : timelines[r].first_left_out + 1]);
    if (marks[steps[r] + 1] < window.end_s) {
      window.begin_s = marks[steps[r]];
      window.end_s = marks[steps[r] + 1];
    }
  }
  const double period_s = window.end_s - window.begin_s;
  while (window.num_steps < kMostSteps &&
         window.begin_s - period_s >= filled_s) {
    window.begin_s -= period_s;
    ++window.num_steps;
  }
  return window;
}

Window find_window(const std::vector<RankTimeline>& timelines) {
  const bool all_count = std::all_of(
      timelines.begin(), timelines.end(),
      [](const RankTimeline& rank) { return rank.steps.size() >= 2; });
  if (timelines.empty() || !all_count) return whole_run(timelines);
  std::vector<std::size_t> steps;
  bool together = true;
  for (const RankTimeline& rank : timelines) {
    steps.push_back(last_forward_step(rank));
    together = together && number_of(rank, steps.back()) ==
                               number_of(timelines[0], steps[0]);
  }
  return together ? flushing_window(timelines, steps)
                  : steady_window(timelines, steps);
}

RankTimeline cut(const RankTimeline& rank, std::size_t r,
                 const Window& window) {
  const double length_s = window.end_s - window.begin_s;
  RankTimeline step;
  step.rank = rank.rank;
  step.steps = {0, length_s};
  for (const TimelineEvent& event : rank.events) {
    if (event.end_s <= window.begin_s || event.begin_s >= window.end_s ||
        !belongs(event, rank, r, window)) {
      continue;
    }
    step.events.push_back(event);
    TimelineEvent& kept = step.events.back();
    kept.begin_s = std::max(event.begin_s - window.begin_s, 0.0);
    kept.end_s = std::min(event.end_s - window.begin_s, length_s);
  }
  for (const MemorySample& sample : rank.memory) {
    // A sample at the end belongs to the next step.
    if (sample.time_s >= window.end_s) break;
    const double time_s = std::max(sample.time_s - window.begin_s, 0.0);
    // The last sample before the window counts.
    if (sample.time_s <= window.begin_s) step.memory.clear();
    step.memory.push_back(sample);
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

// Seconds that at least one of the spans covers.
double covered_s(std::vector<std::pair<double, double>> spans) {
  std::sort(spans.begin(), spans.end());
  double sum = 0, begin = 0, end = 0;
  bool is_open = false;
  for (const auto& [begin_s, end_s] : spans) {
    if (is_open && begin_s <= end) {
      end = std::max(end, end_s);
      continue;
    }
    sum += end - begin;
    begin = begin_s, end = end_s, is_open = true;
  }
  return sum + (end - begin);
}

}  // namespace

bool is_work(const TimelineEvent& event) {
  return event.category != "bubble" && event.category != "exposed" &&
         event.category != "wait" && event.category != "idle";
}

QueueShares queue_shares(const RankTimeline& timeline, const std::string& queue,
                         double step_s) {
  QueueShares shares;
  if (!(step_s > 0)) return shares;
  std::vector<std::pair<double, double>> spans;
  double before_s = 0;
  // Time that these events add to the covered time.
  const auto add = [&](auto belongs) {
    for (const TimelineEvent& event : timeline.events) {
      if (event.queue == queue && belongs(event)) {
        spans.emplace_back(event.begin_s, event.end_s);
      }
    }
    const double now_s = covered_s(spans);
    return (now_s - std::exchange(before_s, now_s)) / step_s;
  };
  const auto of = [](const char* category) {
    return [category](const TimelineEvent& event) {
      return event.category == category;
    };
  };
  shares.busy = add(is_work);
  shares.exposed = add(of("exposed"));
  shares.bubble = add(of("bubble"));
  shares.rest = std::max(0.0, 1 - shares.busy - shares.exposed - shares.bubble);
  return shares;
}

StepView last_step(const std::vector<RankTimeline>& timelines) {
  const Window window = find_window(timelines);
  StepView view;
  view.step_s = window.end_s - window.begin_s;
  view.num_steps = window.num_steps;
  int num_ranks = 0;
  for (std::size_t r = 0; r < timelines.size(); ++r) {
    const RankTimeline& rank = timelines[r];
    RankTimeline step = cut(rank, r, window);
    const auto same = std::find_if(
        view.groups.begin(), view.groups.end(), [&](const RankGroup& group) {
          return alike(group.timeline, step, 1e-6 * view.step_s);
        });
    RankGroup& group =
        same != view.groups.end()
            ? *same
            : view.groups.emplace_back(RankGroup{{}, std::move(step)});
    group.ranks.push_back(rank.rank);
    group.ranks.insert(group.ranks.end(), rank.alike.begin(), rank.alike.end());
    view.world_size = std::max(view.world_size, rank.world_size);
    num_ranks += 1 + static_cast<int>(rank.alike.size());
  }
  for (RankGroup& group : view.groups) {
    std::sort(group.ranks.begin(), group.ranks.end());
  }
  view.world_size = std::max(view.world_size, num_ranks);
  return view;
}

std::string hidden_text(const StepView& view, std::size_t num_shown) {
  auto hidden = static_cast<std::size_t>(view.world_size);
  for (std::size_t g = 0; g < std::min(num_shown, view.groups.size()); ++g) {
    hidden -= view.groups[g].ranks.size();
  }
  if (hidden == 0) return "";
  return hidden == 1 ? "1 more rank is not shown"
                     : fmt::format("{} more ranks are not shown", hidden);
}

std::string class_of(const TimelineEvent& event) {
  if (event.queue == "host") return "host";
  if (event.category == "backward" && event.label.rfind("weights", 0) == 0) {
    return "weights";
  }
  return event.category;
}

std::string micro_batch_of(const TimelineEvent& event) {
  const std::string mark = "micro-batch ";
  const std::size_t at = event.label.find(mark);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + mark.size();
  const std::size_t end = event.label.find_first_not_of("0123456789", begin);
  return event.label.substr(begin, end - begin);
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
  constexpr int kMostSpans = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  int num_spans = 0;
  for (std::size_t i = 0; i < ranks.size();) {
    if (num_spans++ == kMostSpans) {
      return text + fmt::format(" and {} more", ranks.size() - i);
    }
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
