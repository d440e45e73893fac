// The part of report.html that ./shardbook compare adds: its table.

#include "chapters/pictures/svg.h"
#include "chapters/table/compare.h"
#include "chapters/table/internal/page.h"

namespace shardbook::table::internal {

using pictures::svg::escape;

std::string compared_html(const Runs& runs) {
  const ComparedTable table = compare_runs(runs, Charset::kUtf8);
  std::vector<Head> heads = {{"strategy"}};
  for (const ComparedColumn& column : table.columns) {
    const bool is_short = column.name == "peak";
    heads.push_back({is_short ? "peak memory" : column.name, column.unit});
  }
  std::string text =
      "<section id=\"compared\"><h2>Compared</h2><p class=\"about\">" +
      escape(table.setting) + "</p>\n" + open_table("Compared", heads);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    text += "<tr><th scope=\"row\">" + short_link_to(runs[i], runs) + "</th>";
    for (const ComparedColumn& column : table.columns) {
      text += "<td>" + column.cells[i] + "</td>";
    }
    text += "</tr>\n";
  }
  text += kCloseTable;
  for (const std::string& remark : table.remarks) {
    text += "<p class=\"note\" lang=\"en\">" + escape(remark) + "</p>\n";
  }
  text += "<p class=\"note\">";
  for (const std::string& sentence : legend_of(table)) {
    text += "<span>" + escape(sentence) + "</span> ";
  }
  return text + "</p>" + other_trainings_html(runs) + "</section>\n";
}

}  // namespace shardbook::table::internal
