#include <fmt/format.h>

#include <algorithm>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"

namespace shardbook::table::internal {
namespace {

namespace svg = pictures::svg;

constexpr std::size_t kMostGroups = 16;

// "3,355,440 B".
std::string exact_bytes(double bytes) {
  std::string digits = fmt::format("{:.0f}", bytes);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits + " B";
}

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

}  // namespace

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

}  // namespace shardbook::table::internal
