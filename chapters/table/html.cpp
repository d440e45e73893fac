#include "chapters/table/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "chapters/table/internal/page.h"
#include "chapters/table/svg.h"
#include "chapters/table/table.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using internal::bills_html;
using internal::pictures_html;
using svg::escape;

struct Mark {
  const char* css_class;
  const char* sign;
  const char* word;  // for those who do not see the sign
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

std::string sign_html(Verdict verdict) {
  const Mark mark = mark_of(verdict);
  return fmt::format(
      "<span class=\"sign {}\" role=\"img\" aria-label=\"{}\">{}</span>",
      mark.css_class, mark.word, mark.sign);
}

// ---- One claim: a sign, a value, and what the value is.

std::string claim_html(const char* name, const Claim& claim,
                       const std::string& explanation) {
  const bool failed = claim.verdict == Verdict::kFailed;
  return fmt::format(
      "<li class=\"claim {}\">{}<h3>{}</h3><p class=\"value\">{}</p><p>{}</p>"
      "</li>\n",
      mark_of(claim.verdict).css_class, sign_html(claim.verdict), name,
      claim.value.empty() ? "not measured" : escape(claim.value),
      escape(failed ? claim.failure : explanation));
}

std::string time_explanation(const ProgramRun& run) {
  if (!run.virtual_run) {
    return run.wall_step_s >= 0 ? "wall time of a step on this machine; no "
                                  "claim without a virtual cluster"
                                : "";
  }
  const VirtualRun& virtual_run = *run.virtual_run;
  return fmt::format(
      "virtual time of a step on {}{}; {:.0f} % idle, {} of exposed "
      "communication",
      virtual_run.cluster,
      virtual_run.trust.empty() ? "" : " (" + virtual_run.trust + ")",
      100 * virtual_run.idle_share,
      sim::seconds_text(virtual_run.exposed_comm_s));
}

std::string claims_html(const ProgramRun& run) {
  return "<ul class=\"claims\">\n" +
         claim_html(
             "Numbers", run.numbers,
             "largest relative difference to one device" +
                 (run.tolerance.empty() ? ""
                                        : "; allowed is " + run.tolerance)) +
         claim_html("Bytes", run.bytes,
                    "sent by the busiest rank in the whole run") +
         claim_html("Memory", run.memory,
                    "peak of the fullest rank, kind by kind") +
         claim_html("Time", run.time, time_explanation(run)) + "</ul>\n";
}

// ---- The comparison: a table, and a chart per quantity.

std::string title_of(const ProgramRun& run) {
  return run_name(run) + ", " + world_name(run);
}

std::string link_to(std::size_t i, const ProgramRun& run) {
  return fmt::format("<a href=\"#run-{}\">{}</a>", i, escape(title_of(run)));
}

std::string comparison_table(const std::vector<ProgramRun>& runs) {
  std::string text =
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
      "aria-label=\"All runs\"><table><thead><tr><th scope=\"col\">Run</th>"
      "<th scope=\"col\">Loss</th><th scope=\"col\">Numbers</th>"
      "<th scope=\"col\">Bytes sent</th><th scope=\"col\">Peak memory</th>"
      "<th scope=\"col\">Step</th></tr></thead><tbody>\n";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const ProgramRun& run = runs[i];
    text += fmt::format(
        "<tr><th scope=\"row\">{}</th><td>{}</td>", link_to(i, run),
        run.loss.empty() ? "\u2013"
                         : run.loss.front() + " \u2192 " + run.loss.back());
    for (const Claim* claim :
         {&run.numbers, &run.bytes, &run.memory, &run.time}) {
      // A value without a verdict is shown without a sign.
      const bool plain =
          claim->verdict == Verdict::kNotMeasured && !claim->value.empty();
      const bool wall = claim == &run.time && plain && !run.virtual_run;
      text += fmt::format("<td>{} {}{}</td>",
                          plain ? "" : sign_html(claim->verdict),
                          escape(claim->value), wall ? " wall" : "");
    }
    text += "</tr>\n";
  }
  return text + "</tbody></table></div>\n";
}

// A quantity to compare: negative where a run does not have it.
struct Quantity {
  const char* title;
  const char* note;
  const char* css_class;
  std::function<double(const ProgramRun&)> value;
  std::function<std::string(double)> text;
  double full = 0;  // what a full bar means; 0: the largest value
};

std::string percent_text(double share) {
  return fmt::format("{:.0f} %", 100 * share);
}

std::vector<Quantity> quantities() {
  const auto of_virtual = [](auto member) {
    return [member](const ProgramRun& run) {
      return run.virtual_run ? member(*run.virtual_run) : -1.0;
    };
  };
  return {
      {"Step time", "virtual time of one step", "time",
       of_virtual([](const VirtualRun& v) { return v.step_s.counted; }),
       sim::seconds_text},
      {"Idle share", "of the step, the compute queue does nothing", "idle",
       of_virtual([](const VirtualRun& v) { return v.idle_share; }),
       percent_text, 1},
      {"Exposed communication", "compute waits, a message is on its way",
       "comm", of_virtual([](const VirtualRun& v) { return v.exposed_comm_s; }),
       sim::seconds_text},
      {"Peak memory", "of the fullest rank", "space",
       [](const ProgramRun& run) { return run.peak_bytes; }, format_bytes},
      {"Bytes sent", "per step, by the busiest rank; mean of the run", "comm",
       [](const ProgramRun& run) {
         return run.sent_bytes < 0 || run.steps == 0
                    ? -1
                    : run.sent_bytes / static_cast<double>(run.steps);
       },
       format_bytes},
      {"Wall time", "of one step on this machine", "time",
       [](const ProgramRun& run) { return run.wall_step_s; },
       sim::seconds_text},
  };
}

std::string chart(const Quantity& quantity,
                  const std::vector<ProgramRun>& runs) {
  double most = -1;
  for (const ProgramRun& run : runs) most = std::max(most, quantity.value(run));
  if (most < 0) return "";
  if (quantity.full > 0) most = quantity.full;
  std::string text = fmt::format(
      "<figure class=\"chart\"><figcaption><b>{}</b> {}</figcaption>\n"
      "<div class=\"bars\">",
      quantity.title, quantity.note);
  for (const ProgramRun& run : runs) {
    const double value = quantity.value(run);
    const bool measured = value >= 0;
    text += fmt::format(
        "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
        escape(title_of(run)),
        svg::bar(measured && most > 0 ? value / most : 0, quantity.css_class),
        measured ? quantity.text(value) : "\u2013");
  }
  return text + "</div></figure>\n";
}

std::string comparison_html(const std::vector<ProgramRun>& runs) {
  std::string text = "<section id=\"comparison\"><h2>Side by side</h2>\n" +
                     comparison_table(runs) + "<div class=\"charts\">\n";
  for (const Quantity& quantity : quantities()) text += chart(quantity, runs);
  return text + "</div></section>\n";
}

// ---- The page.

std::string run_html(std::size_t i, const ProgramRun& run) {
  std::string about = world_name(run);
  if (!run.setting.empty()) about += " \u00b7 " + run.setting;
  if (run.virtual_run) about += " \u00b7 " + run.virtual_run->cluster;
  if (!run.loss.empty()) {
    about += fmt::format(" \u00b7 loss {} \u2192 {}", run.loss.front(),
                         run.loss.back());
  }
  return fmt::format(
             "<section class=\"run\" id=\"run-{0}\" "
             "aria-labelledby=\"title-{0}\"><h2 id=\"title-{0}\">{1}</h2>"
             "<p class=\"about\">{2}</p>\n",
             i, escape(run_name(run)), escape(about)) +
         claims_html(run) + pictures_html(i, run) +
         (run.sweep ? sweep_html(*run.sweep) : "") + bills_html(run) +
         "</section>\n";
}

std::string summary_html(const std::vector<ProgramRun>& runs) {
  const auto [failed, measured] = count_claims(runs);
  const std::string verdict =
      measured == 0 ? "no claim was measured"
      : failed == 0 ? fmt::format("all {} claims hold", measured)
                    : fmt::format("{} of {} claims failed", failed, measured);
  const Verdict mark = measured == 0 ? Verdict::kNotMeasured
                       : failed == 0 ? Verdict::kPassed
                                     : Verdict::kFailed;
  return fmt::format("<p class=\"summary\">{} {} run{}, {}.</p>\n",
                     sign_html(mark), runs.size(), runs.size() == 1 ? "" : "s",
                     verdict);
}

// JSON inside <script>: no end tag may appear in a string.
std::string data_json(const std::vector<ProgramRun>& runs) {
  std::string json = "[";
  for (const ProgramRun& run : runs) {
    if (json.size() > 1) json += ",\n";
    const bool has = run.virtual_run && run.virtual_run->timeline;
    json += has ? run.virtual_run->timeline_json : "null";
  }
  json += "]";
  for (std::size_t at = 0; (at = json.find('<', at)) != std::string::npos;) {
    json.replace(at, 1, "\\u003c");
  }
  return json;
}

void fill(std::string& page, const std::string& mark, const std::string& text) {
  const std::size_t at = page.find(mark);
  if (at != std::string::npos) page.replace(at, mark.size(), text);
}

}  // namespace

std::string world_name(const ProgramRun& run) {
  if (run.world_size == 1) return "1 rank";
  return fmt::format("{} \u00d7{}", run.backend, run.world_size);
}

std::string report_html(const std::vector<ProgramRun>& runs) {
  std::string body = comparison_html(runs);
  for (std::size_t i = 0; i < runs.size(); ++i) body += run_html(i, runs[i]);
  std::string page = internal::page_template();
  fill(page, "<!--SUMMARY-->", summary_html(runs));
  // The data first: what follows is text of runs, in which no mark is sought.
  fill(page, "/*DATA*/", data_json(runs));
  fill(page, "<!--BODY-->", body);
  return page;
}

}  // namespace shardbook::table
