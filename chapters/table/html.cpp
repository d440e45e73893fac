#include "chapters/table/html.h"

#include <fmt/format.h>

#include "chapters/pictures/svg.h"
#include "chapters/table/compare.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/table.h"
#include "core/how_many.h"

namespace shardbook::table {
namespace {

using internal::are_sets;
using internal::sign_html;
using pictures::svg::escape;

// "What it costs to split a training: 106 runs, 65 simulated on clusters and 41
// trained here; all 292 claims hold."
std::string summary_html(const Runs& runs, const std::string& remarks) {
  const auto [failed, measured] = count_claims(runs);
  const Verdict mark = measured == 0 ? Verdict::kNotMeasured
                       : failed == 0 ? Verdict::kPassed
                                     : Verdict::kFailed;
  const std::size_t trained = trained_runs(runs).size();
  const std::size_t simulated = runs.size() - trained;
  const std::string parts =
      simulated == 0 || trained == 0
          ? ""
          : fmt::format(", {} simulated on clusters and {} trained here",
                        simulated, trained);
  return fmt::format(
      "<p class=\"summary\">What it costs to split a training: "
      "{}{}; {} {}.{}</p>\n",
      how_many(runs.size(), "run"), parts, sign_html(mark),
      verdict_text({failed, measured}),
      remarks.empty() ? ""
                      : " <span lang=\"en\">" + escape(remarks) + "</span>");
}

// The site has its own explorer (build_site.py): it knows this sentence.
std::string explorer_html(const ReportLinks& links) {
  if (links.book.empty()) return "";
  return "<p class=\"note\">A model of your own, planned in a browser: " +
         (links.explorer.empty() ? "<code>./shardbook explore</code>"
                                 : "<a href=\"" + escape(links.explorer) +
                                       "/index.html\">the explorer</a>") +
         "</p>\n";
}

// One element per run: a closed run's timeline is not decoded.
std::string data_html(const Runs& runs) {
  std::string text;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!internal::has_timeline(runs[i])) continue;
    text += fmt::format("<script type=\"text/plain\" id=\"data-{}\">", i) +
            internal::timeline_data(*runs[i].virtual_run->timeline) +
            "</script>\n";
  }
  return text;
}

// The runs of a group under its title: first what they buy, then the proofs.
std::string runs_html(const Runs& runs, const ReportLinks& links) {
  std::vector<RunGroup> groups = simulated_groups(runs);
  const Chosen trained = trained_runs(runs);
  if (!trained.empty()) groups.push_back({"Proof", trained});
  std::string text = "<section id=\"runs\"><h2>The runs</h2>\n";
  for (const RunGroup& group : groups) {
    text += "<h3>" + escape(internal::title_of(group)) + "</h3>\n";
    for (const ProgramRun* run : group.runs) {
      text += internal::run_html(*run, runs, runs.size() == 1, links.book);
    }
  }
  return text + "</section>\n";
}

// The sections of the page, in their order. A run alone needs no tables.
std::string body_html(const Runs& runs, const ReportLinks& links) {
  const std::string sections =
      runs_html(runs, links) + internal::glossary_html();
  if (runs.size() == 1) return sections;
  const internal::FirstLook look = internal::first_look(runs);
  const std::string tables =
      are_compared(runs) ? internal::compared_html(runs)
                         : internal::comparison_html(runs) +
                               internal::buys_html(runs, look.scatter_group) +
                               internal::proof_html(runs);
  return look.html + tables + sections;
}

std::string contents_html(const Runs& runs) {
  std::string text;
  const auto open = [&](const std::string& id, const std::string& title) {
    text += "<li><a href=\"#" + id + "\">" + escape(title) + "</a>";
  };
  const auto add = [&](const std::string& id, const std::string& title) {
    open(id, title);
    text += "</li>\n";
  };
  const std::vector<RunGroup> groups = simulated_groups(runs);
  const bool has_groups = runs.size() > 1 && !are_compared(runs);
  if (are_compared(runs)) add("compared", "Compared");
  if (are_sets(runs)) add("comparison", "Compared");
  if (has_groups && !groups.empty()) {
    open("buys", "What it buys");
    text += "<ul>\n";
    for (const RunGroup& group : groups) {
      add(internal::id_of(group, runs), internal::title_of(group));
    }
    text += "</ul></li>\n";
  }
  if (has_groups && !trained_runs(runs).empty()) add("proof", "Proof");
  add("runs", "The runs");
  add("words", "Words");
  return text;
}

void fill(std::string& page, const std::string& mark, const std::string& text) {
  const std::size_t at = page.find(mark);
  if (at != std::string::npos) page.replace(at, mark.size(), text);
}

}  // namespace

std::string report_html(const Runs& runs, const std::string& remarks,
                        const ReportLinks& links) {
  std::string page = internal::page_template();
  fill(page, "/*STYLE*/", internal::page_style());
  fill(page, "/*SCRIPT*/", internal::page_script());
  fill(page, "<!--WORDS-->", internal::page_words());
  fill(page, "<!--CONTENTS-->", contents_html(runs));
  fill(page, "<!--SUMMARY-->",
       summary_html(runs, remarks) + explorer_html(links));
  // The data first, so that no mark is searched for in the text of runs.
  fill(page, "<!--DATA-->", data_html(runs));
  fill(page, "<!--BODY-->", body_html(runs, links));
  return page;
}

}  // namespace shardbook::table
