// The part of report.html that ./shardbook compare adds: its table, step time
// against memory, and the timelines of all runs on one axis.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "chapters/pictures/svg.h"
#include "chapters/table/compare.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/run_set.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

using pictures::svg::escape;
using sim::RankGroup;
using sim::StepView;

std::string table_html(const ComparedTable& table,
                       const std::vector<ProgramRun>& runs) {
  std::string text =
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
      "aria-label=\"Compared\"><table><thead><tr><th scope=\"col\">Run</th>";
  for (const ComparedColumn& column : table.columns) {
    const std::string unit =
        column.unit.empty() ? "" : " (" + column.unit + ")";
    text += fmt::format("<th scope=\"col\" title=\"{}\">{}{}</th>",
                        escape(column.meaning), column.name, unit);
  }
  text += "</tr></thead><tbody>\n";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    text += "<tr><th scope=\"row\">" + link_to(i, runs[i]) + "</th>";
    for (const ComparedColumn& column : table.columns) {
      text += "<td>" + column.cells[i] + "</td>";
    }
    text += "</tr>\n";
  }
  return text + "</tbody></table></div>\n";
}

// What a queue does, from 0 to `length_s`. Neighbours of one class that touch
// are one block; waiting is thin, because nothing runs.
std::string strip_svg(const sim::RankTimeline& timeline,
                      const std::string& queue, double length_s) {
  constexpr double kWidth = 1000;
  std::map<std::string, std::vector<std::pair<double, double>>> rows;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue != queue || event.category == "wait") continue;
    const double from = kWidth * event.begin_s / length_s;
    const double to = kWidth * event.end_s / length_s;
    auto& row = rows[sim::class_of(event)];
    if (!row.empty() && from - row.back().second < 0.4) {
      row.back().second = std::max(row.back().second, to);
    } else {
      row.emplace_back(from, to);
    }
  }
  std::string paths;
  for (const auto& [css_class, row] : rows) {
    const bool is_thin = css_class == "bubble" || css_class == "exposed";
    paths += fmt::format("<path class=\"{}\" d=\"", css_class);
    for (const auto& [from, to] : row) {
      const double width = std::max(to - from, 0.4);
      paths += fmt::format("M{:.1f} {}h{:.1f}v{}h{:.1f}z", from,
                           is_thin ? 4 : 0, width, is_thin ? 2 : 10, -width);
    }
    paths += "\"/>";
  }
  return fmt::format(
      "<svg class=\"lane{}\" viewBox=\"0 0 {} 10\" "
      "preserveAspectRatio=\"none\" "
      "aria-hidden=\"true\">{}</svg>",
      queue == "compute" ? " compute" : "", kWidth, paths);
}

// All queues of a rank; where ranks differ, what each of them computes.
std::string strips_html(const StepView& view, double length_s) {
  std::string text;
  const auto add = [&](const std::string& name, const RankGroup& group,
                       const std::string& queue) {
    const double busy =
        sim::queue_shares(group.timeline, queue, view.step_s).busy;
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{:.0f} "
        "%</span>\n",
        escape(name), strip_svg(group.timeline, queue, length_s), 100 * busy);
  };
  for (const RankGroup& group : view.groups) {
    if (view.groups.size() > 1) {
      add(sim::rank_list(group.ranks), group, "compute");
      continue;
    }
    for (const std::string& queue : sim::queue_names(group.timeline)) {
      add(queue, group, queue);
    }
  }
  return "<div class=\"lanes\">\n" + text + "</div>\n";
}

std::string axis_html(double length_s) {
  constexpr int kMostMarks = 4;  // a phone has room for as many
  const double distance = sim::axis_distance(length_s, kMostMarks);
  std::string marks;
  for (int i = 0; distance > 0 && i * distance < 0.95 * length_s; ++i) {
    marks += fmt::format("<span style=\"left:{:.2f}%\">{}</span>",
                         100 * i * distance / length_s,
                         i == 0 ? "0" : sim::seconds_text(i * distance));
  }
  return "<div class=\"lanes\"><div class=\"axis\" aria-hidden=\"true\">" +
         marks + "</div></div>\n";
}

std::string legend_html(const std::vector<const ProgramRun*>& runs) {
  std::set<std::string> used;
  for (const ProgramRun* run : runs) {
    for (const RankGroup& group : run->virtual_run->timeline->groups) {
      for (const sim::TimelineEvent& event : group.timeline.events) {
        used.insert(sim::class_of(event));
      }
    }
  }
  std::string text = "<ul class=\"legend\">";
  for (const auto& [css_class, title] : sim::kEventClasses) {
    if (used.count(css_class) == 0) continue;
    text += fmt::format(
        "<li><svg class=\"swatch\" viewBox=\"0 0 10 10\" aria-hidden=\"true\">"
        "<rect class=\"{}\" width=\"10\" height=\"10\"/></svg>{}</li>",
        css_class, title);
  }
  return text + "</ul>\n";
}

// The yardstick is left out: beside it the others would be too short to read.
std::string timelines_html(const std::vector<ProgramRun>& runs) {
  std::vector<const ProgramRun*> drawn;
  double length_s = 0;
  for (const ProgramRun& run : runs) {
    const bool has = run.virtual_run && run.virtual_run->timeline;
    if (!has || (&run == &runs[0] && run.world_size == 1)) continue;
    drawn.push_back(&run);
    length_s = std::max(length_s, run.virtual_run->timeline->step_s);
  }
  if (length_s <= 0) return "";
  std::string text =
      "<figure><figcaption><b>Where the time goes</b> a step of each run, on "
      "one time axis; at the right the share in which a queue is busy"
      "</figcaption>\n" +
      legend_html(drawn);
  for (const ProgramRun* run : drawn) {
    const StepView& view = *run->virtual_run->timeline;
    text += fmt::format(
        "<div class=\"track\"><h4>{}</h4><p class=\"shares\">{}{}</p>",
        escape(run_name(*run)), sim::seconds_text(view.step_s),
        view.num_steps == 1 ? ""
                            : fmt::format(" for {} steps", view.num_steps));
    text += strips_html(view, length_s) + "</div>\n";
  }
  return text + axis_html(length_s) + "</figure>\n";
}

}  // namespace

std::string compared_html(const std::vector<ProgramRun>& runs) {
  const ComparedTable table = compare_runs(runs, Charset::kUtf8);
  std::string text =
      "<section id=\"compared\"><h2>One training, several ways</h2>"
      "<p class=\"about\">" +
      escape(table.setting) + "</p>\n" + table_html(table, runs);
  for (const std::string& remark : table.remarks) {
    text += "<p class=\"note\">" + escape(remark) + "</p>\n";
  }
  text += "<p class=\"note\">" + escape(legend_of(table)) + "</p>\n";
  RunGroup all;
  for (const ProgramRun& run : runs) all.runs.push_back(&run);
  return text + timelines_html(runs) + scatter_html(all, runs) + "</section>\n";
}

}  // namespace shardbook::table::internal
