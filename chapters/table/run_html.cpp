// A section of report.html: one run.

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/run.h"
#include "chapters/table/table.h"
#include "core/how_many.h"
#include "sim/timeline_text.h"

namespace shardbook::table::internal {
namespace {

struct Mark {
  const char* css_class;
  const char* sign;
  const char* word;  // for screen readers
};

Mark mark_of(Verdict verdict) {
  if (verdict == Verdict::kNotMeasured) {
    return {"unmeasured", "\u2013", "not measured"};
  }
  return verdict == Verdict::kPassed ? Mark{"passed", "\u2713", "holds"}
                                     : Mark{"failed", "\u2717", "failed"};
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
  for (std::size_t e = 0; e < load.shares.size(); ++e) {
    heights.push_back(load.shares[e] / kMostShown);
    names.push_back(fmt::format("expert {}: {:.2f}", e, load.shares[e]));
  }
  const auto busiest = std::ranges::max_element(heights) - heights.begin();
  const std::string& most = names[static_cast<std::size_t>(busiest)];
  return fmt::format(
      "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
      escape(load.layer),
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

/// One of its trainings, by one of the two clocks.
struct Timed {
  std::string split_size, text;
  double seconds, deviation;
};

Timed timed(const SweepTime& time, bool on_the_wall) {
  const std::string split_size = std::to_string(time.split_size);
  if (!on_the_wall) {
    return {split_size, sim::seconds_text(time.virtual_s), time.virtual_s, 0};
  }
  return {split_size,
          fmt::format("{} \u00b1 {}", sim::seconds_text(time.wall_s),
                      sim::seconds_text(time.wall_sd_s)),
          time.wall_s, time.wall_sd_s};
}

std::string bars_html(
    const std::vector<std::pair<std::string, Timed>>& trainings) {
  double most = 0;
  for (const auto& [name, time] : trainings) {
    most = std::max(most, time.seconds + time.deviation);
  }
  std::string text = "<div class=\"bars wide\">";
  for (const auto& [name, time] : trainings) {
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
        name,
        svg::bar_with_error(time.seconds / most, time.deviation / most, "time"),
        time.text);
  }
  return text + "</div>\n";
}

std::string curve_html(const std::vector<Timed>& splits, const Timed& single,
                       const Timed& naive) {
  double most = std::max(single.seconds, naive.seconds);
  for (const Timed& time : splits) {
    most = std::max(most, time.seconds + time.deviation);
  }
  std::vector<svg::Point> points;
  std::string words, axis;
  for (const Timed& time : splits) {
    const double x = (static_cast<double>(points.size()) + 0.5) /
                     static_cast<double>(splits.size());
    words += fmt::format("{}splits of {}: {}", points.empty() ? "" : "; ",
                         time.split_size, time.text);
    axis += fmt::format("<span style=\"left:{:.2f}%\">{}</span>", 100 * x,
                        time.split_size);
    points.push_back({x, time.seconds / most, time.deviation / most});
  }
  return fmt::format(
      "<div class=\"plot\"><b>by split size; lines: one device (solid), "
      "naive (dashed)</b><div class=\"scale\" aria-hidden=\"true\">"
      "<span>{}</span><span>0</span></div>{}"
      "<div class=\"axis\" aria-hidden=\"true\">{}</div></div>\n",
      sim::seconds_text(most),
      svg::curve(points, single.seconds / most, naive.seconds / most, words),
      axis);
}

/// The times of one device, the naive schedule and the best split size as bars
/// with their deviations, and a curve over the split sizes.
std::string clock_html(const Sweep& sweep, bool on_the_wall,
                       const std::string& note) {
  const Timed single = timed(sweep.single, on_the_wall),
              naive = timed(sweep.naive, on_the_wall);
  if (single.seconds <= 0) return "";
  std::vector<Timed> splits;
  for (const SweepTime& time : sweep.pipelined) {
    splits.push_back(timed(time, on_the_wall));
  }
  const Timed& best = *std::ranges::min_element(splits, {}, &Timed::seconds);
  return fmt::format(
             "<figure class=\"sweep\"><figcaption><b>Split sizes</b> {}"
             "</figcaption>\n",
             escape(note)) +
         bars_html({{"one device", single},
                    {"naive", naive},
                    {"splits of " + best.split_size, best}}) +
         curve_html(splits, single, naive) + "</figure>\n";
}

std::string sweep_html(const Sweep& sweep) {
  return clock_html(sweep, true,
                    "wall time of a step on this machine, " +
                        how_many(sweep.repeats, "repeat") +
                        ", one standard deviation") +
         clock_html(sweep, false, "virtual time of a step on " + sweep.cluster);
}

// ---- Bills

constexpr std::size_t kMostBills = 16;

std::string rows_html(const RankBill& bill) {
  std::string rows;
  const auto add = [&](std::string name, const Figure& figure,
                       const char* not_predicted, const std::string& sign) {
    std::ranges::replace(name, '_', ' ');
    const auto exact = [](double bytes) { return with_commas(bytes) + " B"; };
    rows += fmt::format(
        "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td></tr>\n",
        escape(name),
        figure.predicted < 0 ? not_predicted : exact(figure.predicted),
        exact(figure.counted), sign);
  };
  const auto compare = [&](const std::string& name, const Figure& figure) {
    if (figure.predicted <= 0 && figure.counted == 0) return;
    add(name, figure, "not predicted",
        figure.predicted < 0 ? ""
        : figure.predicted == figure.counted
            ? sign_html(Verdict::kPassed, "equal")
            : sign_html(Verdict::kFailed, "different"));
  };
  compare("bytes sent", bill.sent);
  for (const auto& [kind, figure] : bill.held) {
    compare(kind == "activation" ? "activations kept" : kind + " held", figure);
  }
  for (const auto& [kind, peak] : bill.peak) {
    if (peak.counted > 0) add("peak " + kind + ", simulated", peak, "", "");
  }
  return rows;
}

/// Predicted and counted, per rank; ranks with the same bill share rows.
std::string bills_html(const ProgramRun& run, const Runs& runs) {
  std::vector<std::string> bills;
  std::map<std::string, std::vector<int>> ranks;
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    const std::string rows = rows_html(run.ranks[r]);
    add_once(bills, rows);
    ranks[rows].push_back(static_cast<int>(r));
  }
  std::string bodies;
  for (std::size_t b = 0; b < std::min(bills.size(), kMostBills); ++b) {
    if (bills[b].empty()) continue;
    bodies += fmt::format(
        "<tbody><tr><th colspan=\"4\" scope=\"rowgroup\">{}{}</th></tr>\n{}"
        "</tbody>\n",
        sim::rank_list(ranks[bills[b]]),
        ranks[bills[b]].size() > 1 ? ", each" : "", bills[b]);
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
          number_of(run, runs), escape(full_name(run, runs))) +
      bodies + "</table></div>";
  if (bills.size() > kMostBills) {
    text += fmt::format("<p class=\"note\">Further bills: {}.</p>",
                        bills.size() - kMostBills);
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
  return std::ranges::any_of(
      runs, [&](const auto& set) { return set != runs.front().set; },
      &ProgramRun::set);
}

std::string full_name(const ProgramRun& run, const Runs& runs) {
  return fmt::format("{}{}, {} \u00d7{}", are_sets(runs) ? run.set + ": " : "",
                     run_name(run), run.backend, run.world_size);
}

std::string link_to(const ProgramRun& run, const Runs& runs, bool is_full) {
  return fmt::format("<a href=\"#run-{}\">{}</a>", number_of(run, runs),
                     escape(is_full ? full_name(run, runs) : run_name(run)));
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
