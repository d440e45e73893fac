#include "chapters/table/html.h"

#include <fmt/format.h>

#include "chapters/pictures/svg.h"
#include "chapters/table/compare.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/table.h"

namespace shardbook::table {
namespace {

namespace svg = pictures::svg;

using internal::sign_html;

std::string summary_html(const std::vector<ProgramRun>& runs,
                         const std::string& remarks) {
  const auto [failed, measured] = count_claims(runs);
  const std::string verdict =
      measured == 0 ? "no claim was measured"
      : failed == 0 ? fmt::format("all {} claims hold", measured)
                    : fmt::format("{} of {} claims failed", failed, measured);
  const Verdict mark = measured == 0 ? Verdict::kNotMeasured
                       : failed == 0 ? Verdict::kPassed
                                     : Verdict::kFailed;
  return fmt::format("<p class=\"summary\">{} {} run{}, {}.{}</p>\n",
                     sign_html(mark), runs.size(), runs.size() == 1 ? "" : "s",
                     verdict,
                     remarks.empty() ? "" : " " + svg::escape(remarks));
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

std::string report_html(const std::vector<ProgramRun>& runs,
                        const std::string& remarks) {
  const std::string tables = are_compared(runs) ? internal::compared_html(runs)
                                                : internal::proof_html(runs) +
                                                      internal::buys_html(runs);
  std::string body = internal::comparison_html(runs) + tables +
                     internal::glossary_html() +
                     "<section id=\"runs\"><h2>The runs</h2>\n";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    body += internal::run_html(i, runs[i], runs.size() == 1);
  }
  body += "</section>\n";
  std::string page = internal::page_template();
  fill(page, "/*STYLE*/", internal::page_style());
  fill(page, "/*SCRIPT*/", internal::page_script());
  fill(page, "<!--SUMMARY-->", summary_html(runs, remarks));
  // The data first, so that no mark is searched for in the text of runs.
  fill(page, "/*DATA*/", data_json(runs));
  fill(page, "<!--BODY-->", body);
  return page;
}

}  // namespace shardbook::table
