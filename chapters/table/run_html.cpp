// A section of report.html: one run.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/pictures/svg.h"
#include "chapters/table/html.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"
#include "core/how_many.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

namespace svg = pictures::svg;

using svg::escape;

struct Mark {
  const char* css_class;
  const char* sign;
  const char* word;  // for screen readers
};

Mark mark_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kPassed:
      return {"passed", "\u2713", "holds"};
    case Verdict::kFailed:
      return {"failed", "\u2717", "failed"};
    default:
      return {"unmeasured", "\u2013", "not measured"};
  }
}

std::string claim_html(const char* name, const Claim& claim,
                       const std::string& explanation) {
  const bool failed = claim.verdict == Verdict::kFailed;
  return fmt::format(
      "<li class=\"claim {}\">{}<b>{}</b><p class=\"value\">{}</p><p{}>{}</p>"
      "</li>\n",
      mark_of(claim.verdict).css_class, sign_html(claim.verdict), name,
      claim.value.empty() ? "not measured" : escape(claim.value),
      failed ? " lang=\"en\"" : "",
      escape(failed ? claim.failure : explanation));
}

// The causes of idle time, in shares of the step.
std::string idle_text(const VirtualRun& run) {
  const double step_s = run.step_s.counted;
  if (!(step_s > 0)) return "";
  const double bubble = run.bubble_s / step_s;
  const double exposed = run.exposed_comm_s / step_s;
  const double rest = std::max(0.0, run.idle_share - bubble - exposed);
  std::string text = fmt::format(
      "idle {:.1f} % = bubble {:.1f} + exposed communication {:.1f} + rest "
      "{:.1f}",
      100 * run.idle_share, 100 * bubble, 100 * exposed, 100 * rest);
  if (rest > 0.25) {
    text +=
        ". Launching an operation takes longer than running it: a larger "
        "model or batch would keep this device busy";
  }
  return text;
}

std::string time_explanation(const ProgramRun& run) {
  if (!run.virtual_run) {
    return run.wall_step_s >= 0 ? "wall time of a step on this machine; no "
                                  "claim without a virtual cluster"
                                : "";
  }
  const VirtualRun& virtual_run = *run.virtual_run;
  return fmt::format(
      "simulated time of a step on {}{}{}; {}", virtual_run.cluster,
      virtual_run.trust.empty() ? "" : " (" + virtual_run.trust + ")",
      virtual_run.step_s.predicted < 0 ? "" : ", which a closed form predicts",
      idle_text(virtual_run));
}

std::string memory_explanation(const ProgramRun& run) {
  std::string text = "held by the fullest rank";
  if (run.peak_bytes >= 0) {
    text += fmt::format("; at its peak, simulated, {}",
                        format_bytes(run.peak_bytes));
  }
  if (run.capacity_bytes > 0) {
    text += fmt::format(": {} of {} GB{}", format_gigabytes(run.peak_bytes),
                        format_gigabytes(run.capacity_bytes),
                        fits(run) ? "" : ", does not fit");
  }
  return text;
}

std::string claims_html(const ProgramRun& run) {
  return "<ul class=\"claims\">\n" +
         claim_html("Numbers", run.numbers,
                    "largest relative difference to one device" +
                        (run.tolerance.empty() || run.numbers.value.empty()
                             ? ""
                             : "; allowed is " + run.tolerance)) +
         claim_html("Bytes", run.bytes, "sent per step by the busiest rank") +
         claim_html("Memory", run.memory, memory_explanation(run)) +
         claim_html("Time", run.time, time_explanation(run)) + "</ul>\n";
}

/// Twice the even load is as high as a row.
constexpr double kMostShown = 2;

std::string layer_html(const LayerLoad& load) {
  std::vector<double> heights;
  std::vector<std::string> names;
  std::size_t busiest = 0;
  for (std::size_t e = 0; e < load.shares.size(); ++e) {
    heights.push_back(load.shares[e] / kMostShown);
    names.push_back(fmt::format("expert {}: {:.2f}", e, load.shares[e]));
    if (load.shares[e] > load.shares[busiest]) busiest = e;
  }
  const std::string most =
      fmt::format("expert {}: {:.2f}", busiest, load.shares[busiest]);
  return fmt::format(
      "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
      svg::escape(load.layer),
      svg::columns(heights, names, 1 / kMostShown,
                   load.layer + ", load of " +
                       std::to_string(load.shares.size()) +
                       " experts; the busiest is " + most),
      most);
}

// A row of columns per layer, one for each expert; a line where the load is
// even.
std::string expert_loads_html(const std::vector<LayerLoad>& loads) {
  if (loads.empty()) return "";
  std::string text =
      "<figure class=\"loads\"><figcaption><b>Load of each expert</b> how "
      "often tokens chose it, relative to an even load (dashed line); at the "
      "right the busiest</figcaption>\n<div class=\"bars wide\">";
  for (const LayerLoad& load : loads) text += layer_html(load);
  return text + "</div></figure>\n";
}

std::string source_html(const ProgramRun& run, const std::string& book) {
  std::string text = "<p class=\"source\">";
  if (!run.command.empty()) text += "<code>" + escape(run.command) + "</code> ";
  // A program from elsewhere has no page
  const char first = run.chapter[0];
  if (!book.empty() && first >= '0' && first <= '9') {
    text += fmt::format(
        "<a href=\"{0}/chapters/{1}/README.md\">the page of {1}</a>",
        escape(book), escape(run.chapter));
  }
  return text + "</p>\n";
}

// ---- A sweep over split sizes

/// One of the two clocks.
struct Clock {
  std::string title, note;
  double SweepTime::*seconds;
  bool has_deviation;
};

double deviation(const Clock& clock, const SweepTime& time) {
  return clock.has_deviation ? time.wall_sd_s : 0;
}

std::string time_text(const Clock& clock, const SweepTime& time) {
  const std::string mean = sim::seconds_text(time.*clock.seconds);
  return clock.has_deviation ? fmt::format("{} \u00b1 {}", mean,
                                           sim::seconds_text(time.wall_sd_s))
                             : mean;
}

std::string bars_html(const Sweep& sweep, const Clock& clock,
                      const SweepTime& best) {
  const std::vector<std::pair<std::string, const SweepTime*>> bars = {
      {"one device", &sweep.single},
      {"naive", &sweep.naive},
      {fmt::format("splits of {}", best.split_size), &best}};
  double most = 0;
  for (const auto& [name, time] : bars) {
    most = std::max(most, time->*clock.seconds + deviation(clock, *time));
  }
  std::string text = "<div class=\"bars wide\">";
  for (const auto& [name, time] : bars) {
    const double seconds = time->*clock.seconds;
    const double sd = deviation(clock, *time);
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
        name,
        most > 0 ? svg::bar_with_error(seconds / most, sd / most, "time")
                 : svg::bar(0, "time"),
        time_text(clock, *time));
  }
  return text + "</div>\n";
}

std::string curve_html(const Sweep& sweep, const Clock& clock) {
  double most =
      std::max(sweep.single.*clock.seconds, sweep.naive.*clock.seconds);
  std::vector<svg::Point> points;
  for (const SweepTime& time : sweep.pipelined) {
    most = std::max(most, time.*clock.seconds + deviation(clock, time));
  }
  std::string words, axis;
  const auto count = static_cast<double>(sweep.pipelined.size());
  for (std::size_t i = 0; i < sweep.pipelined.size(); ++i) {
    const SweepTime& time = sweep.pipelined[i];
    const double x = (static_cast<double>(i) + 0.5) / count;
    points.push_back(
        {x, time.*clock.seconds / most, deviation(clock, time) / most});
    words += fmt::format("{}splits of {}: {}", i == 0 ? "" : "; ",
                         time.split_size, time_text(clock, time));
    axis += fmt::format("<span style=\"left:{:.2f}%\">{}</span>", 100 * x,
                        time.split_size);
  }
  return fmt::format(
      "<div class=\"plot\"><b>by split size; lines: one device (solid), "
      "naive (dashed)</b><div class=\"scale\" aria-hidden=\"true\">"
      "<span>{}</span><span>0</span></div>{}"
      "<div class=\"axis\" aria-hidden=\"true\">{}</div></div>\n",
      sim::seconds_text(most),
      svg::curve(points, sweep.single.*clock.seconds / most,
                 sweep.naive.*clock.seconds / most, words),
      axis);
}

std::string clock_html(const Sweep& sweep, const Clock& clock) {
  const SweepTime& best =
      *std::min_element(sweep.pipelined.begin(), sweep.pipelined.end(),
                        [&](const SweepTime& a, const SweepTime& b) {
                          return a.*clock.seconds < b.*clock.seconds;
                        });
  if (sweep.single.*clock.seconds <= 0) return "";
  return fmt::format(
             "<figure class=\"sweep\"><figcaption><b>{}</b> {}</figcaption>\n",
             clock.title, svg::escape(clock.note)) +
         bars_html(sweep, clock, best) + curve_html(sweep, clock) +
         "</figure>\n";
}

/// Draws the times of one device, the naive schedule and the best split size as
/// bars with their deviations, and a curve over the split sizes: once in wall
/// time and once in virtual time.
std::string sweep_html(const Sweep& sweep) {
  return clock_html(sweep, {"Split sizes",
                            fmt::format("wall time of a step on this "
                                        "machine, {}, one standard "
                                        "deviation",
                                        how_many(sweep.repeats, "repeat")),
                            &SweepTime::wall_s, true}) +
         clock_html(sweep, {"Split sizes",
                            "virtual time of a step on " + sweep.cluster,
                            &SweepTime::virtual_s, false});
}

// ---- Bills

constexpr std::size_t kMostGroups = 16;

std::string exact_bytes(double bytes) { return with_commas(bytes) + " B"; }

std::string readable(std::string kind) {
  std::replace(kind.begin(), kind.end(), '_', ' ');
  return kind;
}

std::string row_html(const std::string& name, const Figure& figure) {
  if (figure.predicted <= 0 && figure.counted == 0) return "";
  const bool predicted = figure.predicted >= 0;
  const bool equal = figure.predicted == figure.counted;
  return fmt::format(
      "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td></tr>\n",
      svg::escape(readable(name)),
      predicted ? exact_bytes(figure.predicted) : "not predicted",
      exact_bytes(figure.counted),
      !predicted ? ""
      : equal    ? sign_html(Verdict::kPassed, "equal")
                 : sign_html(Verdict::kFailed, "different"));
}

std::string rows_html(const RankBill& bill) {
  std::string rows = row_html("bytes sent", bill.sent);
  for (const auto& [kind, figure] : bill.held) {
    rows += row_html(kind == "activation" ? "activations kept" : kind + " held",
                     figure);
  }
  for (const auto& [kind, peak] : bill.peak) {
    if (peak.counted == 0) continue;
    rows += fmt::format(
        "<tr><th scope=\"row\">{}, simulated</th><td>{}</td><td>{}</td>"
        "<td></td></tr>\n",
        svg::escape("peak " + readable(kind)),
        peak.predicted < 0 ? "" : exact_bytes(peak.predicted),
        exact_bytes(peak.counted));
  }
  return rows;
}

// Ranks of one kind have one bill.
struct BillGroup {
  std::string rows;
  std::vector<int> ranks;
};

std::vector<BillGroup> group_bills(const std::vector<RankBill>& bills) {
  std::vector<BillGroup> groups;
  for (std::size_t r = 0; r < bills.size(); ++r) {
    const std::string rows = rows_html(bills[r]);
    auto found = std::find_if(
        groups.begin(), groups.end(),
        [&](const BillGroup& group) { return group.rows == rows; });
    if (found == groups.end()) found = groups.insert(found, {rows, {}});
    found->ranks.push_back(static_cast<int>(r));
  }
  return groups;
}

std::string group_html(const BillGroup& group) {
  if (group.rows.empty()) return "";
  return fmt::format(
      "<tbody><tr><th colspan=\"4\" scope=\"rowgroup\">{}{}</th></tr>\n{}"
      "</tbody>\n",
      sim::rank_list(group.ranks), group.ranks.size() > 1 ? ", each" : "",
      group.rows);
}

/// Predicted and counted, per rank; ranks with the same bill share rows.
std::string bills_html(const ProgramRun& run, const Runs& runs) {
  const std::vector<BillGroup> groups = group_bills(run.ranks);
  std::string bodies;
  for (std::size_t g = 0; g < std::min(groups.size(), kMostGroups); ++g) {
    bodies += group_html(groups[g]);
  }
  if (bodies.empty()) return "";
  std::string text =
      fmt::format(
          "<details open><summary>Predicted and counted, per rank</summary>"
          "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
          "aria-label=\"Predicted and counted by run {}: {}\">"
          "<table class=\"bill\"><thead><tr><td></td>"
          "<th scope=\"col\">Predicted</th><th scope=\"col\">Counted</th>"
          "<th scope=\"col\">Equal</th></tr></thead>\n",
          number_of(run, runs), svg::escape(full_name(run, runs))) +
      bodies + "</table></div>";
  if (groups.size() > kMostGroups) {
    text += fmt::format("<p class=\"note\">Further bills: {}.</p>",
                        groups.size() - kMostGroups);
  }
  return text + "</details>\n";
}

}  // namespace

std::string sign_html(Verdict verdict, const char* word) {
  const Mark mark = mark_of(verdict);
  return fmt::format(
      "<span class=\"sign {}\" role=\"img\" aria-label=\"{}\">{}</span>",
      mark.css_class, word == nullptr ? mark.word : word, mark.sign);
}

std::string other_trainings_html(const Chosen& runs) {
  const std::string text = other_trainings_text(runs);
  return text.empty() ? "" : "<p class=\"note\">" + escape(text) + "</p>\n";
}

std::size_t number_of(const ProgramRun& run, const Runs& runs) {
  return static_cast<std::size_t>(&run - runs.data());
}

bool are_sets(const Runs& runs) {
  return std::any_of(runs.begin(), runs.end(), [&](const ProgramRun& run) {
    return run.set != runs.front().set;
  });
}

std::string full_name(const ProgramRun& run, const Runs& runs) {
  return fmt::format("{}{}, {} \u00d7{}", are_sets(runs) ? run.set + ": " : "",
                     run_name(run), run.backend, run.world_size);
}

std::string link_to(const ProgramRun& run, const Runs& runs) {
  return fmt::format("<a href=\"#run-{}\">{}</a>", number_of(run, runs),
                     escape(full_name(run, runs)));
}

std::string short_link_to(const ProgramRun& run, const Runs& runs) {
  return fmt::format("<a href=\"#run-{}\">{}</a>", number_of(run, runs),
                     escape(run_name(run)));
}

std::string run_html(const ProgramRun& run, const Runs& runs, bool is_open,
                     const std::string& book) {
  std::string about = run.title.empty() ? "" : run.title + " \u00b7 ";
  about += run.chapter;
  if (!setting_of(run).empty()) about += " \u00b7 " + setting_of(run);
  if (!run.loss.empty()) {
    about += fmt::format(" \u00b7 loss {} \u2192 {}", run.loss.front(),
                         run.loss.back());
  }
  return fmt::format(
             "<details class=\"run\" id=\"run-{}\"{}><summary><h4>{}</h4>{} "
             "<span class=\"about\">{}</span></summary>"
             "<p class=\"about\">{}</p>\n",
             number_of(run, runs), is_open ? " open" : "",
             escape(full_name(run, runs)),
             count_claims(run).failed > 0 ? sign_html(Verdict::kFailed) : "",
             run.time.value.empty() ? "" : escape(run.time.value) + " per step",
             escape(about)) +
         source_html(run, book) + claims_html(run) + pictures_html(run, runs) +
         (run.sweep ? sweep_html(*run.sweep) : "") +
         expert_loads_html(run.expert_loads) + bills_html(run, runs) +
         "</details>\n";
}

}  // namespace shardbook::table::internal
