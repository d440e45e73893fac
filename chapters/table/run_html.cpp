// A section of report.html: one run.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/pictures/svg.h"
#include "chapters/table/html.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"
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

}  // namespace

std::string sign_html(Verdict verdict, const char* word) {
  const Mark mark = mark_of(verdict);
  return fmt::format(
      "<span class=\"sign {}\" role=\"img\" aria-label=\"{}\">{}</span>",
      mark.css_class, word == nullptr ? mark.word : word, mark.sign);
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
