// The first screen of report.html: step time against memory of one group of
// runs, and a few timelines on one axis.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "chapters/table/internal/page.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

constexpr std::size_t kMostTimelines = 6;
constexpr std::size_t kMostRanks = 4;  // of each of two timelines

double bubble_of(const ProgramRun& run) {
  return run.virtual_run->bubble_s / std::max(step_of(run), 1e-12);
}

// One device would be so much longer that the others could not be read.
Chosen drawable(const Chosen& runs) {
  Chosen drawn;
  for (const ProgramRun* run : runs) {
    if (run->world_size > 1 && has_timeline(*run)) drawn.push_back(run);
  }
  return drawn;
}

bool are_few(const Chosen& drawn) {
  return drawn.size() >= 2 && drawn.size() <= kMostTimelines;
}

// How much the timelines of two pipelines of the same devices show: one has more
// bubbles, and one needs more memory. Their views are as long as a step.
double contrast(const ProgramRun& a, const ProgramRun& b) {
  const auto num_ranks = [](const ProgramRun& run) {
    return run.virtual_run->timeline->groups.size();
  };
  const auto is_step = [](const ProgramRun& run) {
    return std::abs(run.virtual_run->timeline->step_s / step_of(run) - 1) <
           0.01;
  };
  if (!a.other_training.empty() || !b.other_training.empty() ||
      a.world_size != b.world_size || num_ranks(a) != num_ranks(b) ||
      num_ranks(a) > kMostRanks || !is_step(a) || !is_step(b) ||
      std::min(a.peak_bytes, b.peak_bytes) <= 0) {
    return 0;
  }
  return std::abs(bubble_of(a) - bubble_of(b)) *
         std::abs(std::log(a.peak_bytes / b.peak_bytes));
}

// The timelines: all runs of the only group, the two of a larger page that differ
// most, or all runs of a small group.
Chosen choose_timelines(const std::vector<RunGroup>& groups) {
  Chosen best;
  double most = 0;
  for (const RunGroup& group : groups) {
    const Chosen drawn = drawable(group.runs);
    if (groups.size() == 1 && are_few(drawn)) return drawn;
    for (const ProgramRun* a : drawn) {
      for (const ProgramRun* b : drawn) {
        if (contrast(*a, *b) <= most || bubble_of(*a) < bubble_of(*b)) continue;
        most = contrast(*a, *b);
        best = {a, b};
      }
    }
  }
  for (const RunGroup& group : groups) {
    if (!best.empty()) break;
    const Chosen drawn = drawable(group.runs);
    if (are_few(drawn)) best = drawn;
  }
  return best;
}

// Whether the strategy decides: of equally many devices, some ways to train as one
// device does fit in memory, and some do not.
bool decides_what_fits(const RunGroup& group) {
  std::map<int, std::set<bool>> found;
  for (const ProgramRun* run : group.runs) {
    if (run->world_size > 1 && run->other_training.empty()) {
      found[run->world_size].insert(fits(*run));
    }
  }
  return std::any_of(found.begin(), found.end(),
                     [](const auto& each) { return each.second.size() == 2; });
}

// The scatter of the first such group, or else of the first that has one.
void add_scatter(const std::vector<RunGroup>& groups, const Runs& runs,
                 FirstLook& look) {
  for (const bool is_choosy : {true, false}) {
    for (const RunGroup& group : groups) {
      if (is_choosy && !decides_what_fits(group)) continue;
      const std::string setting = setting_of(*group.runs.front());
      look.html = scatter_html(
          group, runs,
          group.title.empty() ? setting : group.title + ": " + setting);
      if (look.html.empty()) continue;
      look.scatter_group = id_of(group, runs);
      return;
    }
  }
}

// The line of compared sets whose steps differ most.
Chosen most_changed(const Runs& runs) {
  Chosen drawn;
  double most = -1;
  for (const Chosen& line : compare_sets(runs)) {
    const bool all =
        std::all_of(line.begin(), line.end(),
                    [](const ProgramRun* run) { return has_timeline(*run); });
    if (!all || !are_few(line)) continue;
    double change = 0;
    for (const ProgramRun* run : line) {
      change = std::max(change,
                        std::abs(std::log(step_of(*run) / step_of(*line[0]))));
    }
    if (change <= most) continue;
    most = change;
    drawn = line;
  }
  return drawn;
}

std::string title_of_timelines(Chosen drawn, const Runs& runs) {
  std::stable_sort(
      drawn.begin(), drawn.end(),
      [](const auto* a, const auto* b) { return step_of(*a) < step_of(*b); });
  const ProgramRun &first = *drawn.front(), &last = *drawn.back();
  const bool same = run_name(first) == run_name(last);
  const std::string winner = same ? full_name(first, runs) : run_name(first);
  const std::string loser = same ? full_name(last, runs) : run_name(last);
  const double less = bubble_of(first), more = bubble_of(last);
  if (drawn.size() == 2 && more - less > 0.02) {
    return fmt::format("{} spends {:.0f} % of its step in bubbles, {} {:.0f} %",
                       winner, 100 * less, loser, 100 * more);
  }
  return fmt::format("{} ends its step first, after {}; {} last, after {}",
                     winner, sim::seconds_text(step_of(first)), loser,
                     sim::seconds_text(step_of(last)));
}

}  // namespace

FirstLook first_look(const Runs& runs) {
  std::vector<RunGroup> groups = simulated_groups(runs);
  FirstLook look;
  Chosen drawn;
  if (are_sets(runs)) {
    drawn = most_changed(runs);
  } else {
    const bool are_simulated = !groups.empty();
    if (!are_simulated) groups.push_back({"", trained_runs(runs)});
    drawn = choose_timelines(groups);
    // Runs that trained are of many models
    if (are_simulated || !drawn.empty()) add_scatter(groups, runs, look);
  }
  if (!drawn.empty()) {
    look.html += timelines_html(title_of_timelines(drawn, runs), drawn, runs);
  }
  if (!look.html.empty()) {
    look.html = "<section id=\"first\" aria-label=\"At a glance\">\n" +
                look.html + "</section>\n";
  }
  return look;
}

}  // namespace shardbook::table::internal
