// The simulated runs in report.html: the first screen, step time against memory of
// one group and a few timelines on one axis; and "What it buys", a group at a time.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/table.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

/// Step time against memory of a group's runs; empty for fewer than two points.
/// Its title ranks the runs that train as one device does. `workload`: what they
/// train, and where; empty where the text above says it.
std::string scatter_html(const RunGroup& group, const Runs& runs,
                         const std::string& workload) {
  // One device would be so far from the others that they could not be told
  // apart.
  Chosen shown;
  for (const ProgramRun* run : group.runs) {
    if (run->virtual_run && run->world_size > 1 && run->peak_bytes > 0 &&
        step_of(*run) > 0) {
      shown.push_back(run);
    }
  }
  if (shown.size() < 2) return "";
  const bool same_devices =
      std::ranges::all_of(shown, [&](const ProgramRun* run) {
        return run->world_size == shown.front()->world_size;
      });
  const auto name_of = [&](const ProgramRun& run) {
    return run_name(run) +
           (same_devices ? "" : fmt::format(" \u00d7{}", run.world_size));
  };
  const bool compares = std::ranges::any_of(
      shown, [](const ProgramRun* run) { return run->other_training.empty(); });
  std::string points, capacity;
  const ProgramRun *fastest = nullptr, *smallest = nullptr;
  for (const ProgramRun* run : shown) {
    points += fmt::format(
        "<a class=\"point{}\" href=\"#run-{}\" data-memory=\"{}\" "
        "data-time=\"{}\" title=\"{}, {} GB\"><span>{}</span></a>\n",
        fits(*run) ? "" : " over", number_of(*run, runs), run->peak_bytes,
        step_of(*run), sim::seconds_text(step_of(*run)),
        format_gigabytes(run->peak_bytes), escape(name_of(*run)));
    if (run->capacity_bytes > 0) {
      capacity = fmt::format("<span class=\"limit\" data-memory=\"{}\"></span>",
                             run->capacity_bytes);
    }
    // Other trainings may be ranked among themselves only
    if (!fits(*run) || (compares && !run->other_training.empty())) continue;
    if (!fastest || step_of(*run) < step_of(*fastest)) fastest = run;
    if (!smallest || run->peak_bytes < smallest->peak_bytes) smallest = run;
  }
  const std::string note = other_trainings_text(shown);
  std::string title = compares && !note.empty()
                          ? "None of the runs without * fits in memory"
                          : "None of these runs fits in memory";
  if (fastest) {
    title = fmt::format("{} is the fastest that fits: {}", name_of(*fastest),
                        sim::seconds_text(step_of(*fastest)));
  }
  if (smallest != fastest) {
    title +=
        fmt::format("; {} needs the least memory: {} GB", name_of(*smallest),
                    format_gigabytes(smallest->peak_bytes));
  }
  return fmt::format(
      "<figure class=\"scatter\"><figcaption><b>{}</b>{} <span>Upwards: time "
      "of "
      "a step. To the right: peak memory{}.</span>{}</figcaption>"
      "<button type=\"button\" hidden></button>"
      "<div class=\"plane\">{}{}</div></figure>\n",
      escape(title), workload.empty() ? "" : " " + escape(workload) + ".",
      capacity.empty() ? "" : "; dashed: what a device has",
      note.empty() ? "" : " <span>" + escape(note) + "</span>", capacity,
      points);
}

// ---- The first screen

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
  return std::ranges::any_of(
      found, [](const auto& each) { return each.second.size() == 2; });
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
    const bool all = std::ranges::all_of(
        line, [](const ProgramRun* run) { return has_timeline(*run); });
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
  std::ranges::stable_sort(drawn, {},
                           [](const ProgramRun* run) { return step_of(*run); });
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

// ---- A group

const char* kDash = "<td>\u2013</td>";

std::vector<std::string> links_of(const RunGroup& group) {
  std::vector<std::string> links;
  for (const ProgramRun* run : group.runs) {
    if (!run->virtual_run) continue;
    for (const sim::LinkBytes& each : run->virtual_run->links) {
      if (each.bytes > 0) add_once(links, each.link);
    }
  }
  return links;
}

std::string step_cell(const ProgramRun& run, Unit unit, double most_s) {
  if (!run.virtual_run) return kDash;
  return fmt::format("<td class=\"with-bar\">{}{}</td>",
                     number_text(step_of(run), unit),
                     svg::bar(most_s > 0 ? step_of(run) / most_s : 0, "time"));
}

std::string speed_up_cell(const ProgramRun& run, const ProgramRun* one) {
  const std::string text = speed_up_text(run, one);
  if (text.empty()) return kDash;
  return fmt::format("<td{}>{}</td>", text[0] == '(' ? " class=\"muted\"" : "",
                     text);
}

// A full bar is the device's memory; a run that does not fit is marked.
std::string memory_cell(const ProgramRun& run) {
  if (run.peak_bytes < 0) return kDash;
  const std::string peak = format_gigabytes(run.peak_bytes);
  if (run.capacity_bytes <= 0) return "<td>" + peak + "</td>";
  return fmt::format(
      "<td class=\"with-bar\">{}{}{}</td>",
      fits(run) ? "" : "<span class=\"over\">does not fit</span> ", peak,
      svg::bar(run.peak_bytes / run.capacity_bytes,
               fits(run) ? "space" : "over"));
}

std::string sent_cell(const ProgramRun& run, const std::string& link) {
  if (!run.virtual_run) return kDash;
  for (const sim::LinkBytes& each : run.virtual_run->links) {
    if (each.link == link && each.bytes > 0) {
      return "<td>" + format_gigabytes(each.bytes) + "</td>";
    }
  }
  return kDash;
}

std::string idle_cell(const ProgramRun& run) {
  if (!run.virtual_run) return kDash;
  const VirtualRun& time = *run.virtual_run;
  const double step_s = std::max(time.step_s.counted, 1e-12);
  const double bubble = time.bubble_s / step_s;
  const double exposed = time.exposed_comm_s / step_s;
  return fmt::format(
      "<td class=\"with-bar\">{:.1f}{}</td>", 100 * time.idle_share,
      svg::stacked_bar({{bubble, "bubble"},
                        {exposed, "exposed"},
                        {time.idle_share - bubble - exposed, "rest"}}));
}

std::string group_html(const RunGroup& group, const Runs& runs,
                       const std::string& scatter_group) {
  const Unit unit = unit_of(pictures::seconds_unit, group.runs, step_of);
  double most_s = 0;
  for (const ProgramRun* run : group.runs) {
    most_s = std::max(most_s, step_of(*run));
  }
  const std::vector<std::string> links = links_of(group);
  std::vector<Head> heads = {{"strategy"},
                             {"devices"},
                             {"step", unit.name},
                             {"speed-up"},
                             {"peak memory", "GB"}};
  for (const std::string& link : links)
    heads.push_back({"sent over " + link, "GB"});
  heads.push_back({"idle", "%"});

  const std::string title = title_of(group), id = id_of(group, runs);
  const std::string setting = setting_of(*group.runs.front());
  std::string text = fmt::format(
      "<section class=\"group\" id=\"{}\"><h3>{}</h3>{}\n", id, escape(title),
      title == setting ? "" : "<p class=\"about\">" + escape(setting) + "</p>");
  text += open_table(title, heads);
  for (const ProgramRun* run : group.runs) {
    text += fmt::format(
        "<tr><th scope=\"row\">{}{}</th><td>{}</td>",
        count_claims(*run).failed > 0 ? sign_html(Verdict::kFailed) + " " : "",
        link_to(*run, runs), run->world_size);
    text += step_cell(*run, unit, most_s) +
            speed_up_cell(*run, yardstick(group)) + memory_cell(*run);
    for (const std::string& link : links) text += sent_cell(*run, link);
    text += idle_cell(*run) + "</tr>\n";
  }
  return text + kCloseTable + other_trainings_html(group.runs) +
         (id != scatter_group ? scatter_html(group, runs, "")
                              : "<p class=\"note\">Step time against memory "
                                "is drawn <a href=\"#first\">at the top</a>."
                                "</p>\n") +
         "</section>\n";
}

}  // namespace

std::string title_of(const RunGroup& group) {
  if (!group.title.empty()) return group.title;
  const std::string setting = setting_of(*group.runs.front());
  return setting.empty() ? "Simulated" : setting;
}

std::string id_of(const RunGroup& group, const Runs& runs) {
  return fmt::format("group-{}", number_of(*group.runs.front(), runs));
}

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

std::string buys_html(const Runs& runs, const std::string& scatter_group) {
  const std::vector<RunGroup> groups = simulated_groups(runs);
  if (groups.empty()) return "";
  std::string text =
      "<section id=\"buys\"><h2>What it buys</h2><p class=\"about\">Models on "
      "clusters, simulated. The run on one device is the yardstick of a "
      "group's speed-ups. A full bar of memory is the device's.</p>" +
      legend_html({{"bubble", "bubble"},
                   {"exposed", "exposed communication"},
                   {"rest", "rest"}},
                  "<li>idle:</li>");
  for (const RunGroup& group : groups) {
    text += group_html(group, runs, scatter_group);
  }
  return text + "</section>\n";
}

}  // namespace shardbook::table::internal
