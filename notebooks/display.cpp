#include "notebooks/display.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "chapters/pictures/svg.h"
#include "chapters/pictures/text_table.h"

namespace shardbook::notebook {
namespace {

namespace svg = pictures::svg;
namespace text_table = pictures::text_table;
using text_table::Row;
using Rows = std::vector<Row>;

std::string table_html(const Rows& rows, const char* first_row = "th") {
  std::string html = "<table>\n";
  for (const Row& row : rows) {
    html += "<tr>";
    for (const std::string& cell : row) {
      html +=
          fmt::format("<{0} style=\"text-align:right\">{1}</{0}>",
                      &row == &rows[0] ? first_row : "td", svg::escape(cell));
    }
    html += "</tr>\n";
  }
  return html + "</table>\n";
}

// --- Tensors -----------------------------------------------------------------

// The first and last indices of a long dim; -1 stands for all between.
std::vector<std::int64_t> shown_of(std::int64_t size) {
  constexpr std::int64_t kMost = 8, kEnd = 3;
  std::vector<std::int64_t> shown;
  for (std::int64_t i = 0; i < size; ++i) {
    if (size > kMost && i == kEnd) {
      shown.push_back(-1);
      i = size - kEnd;
    }
    shown.push_back(i);
  }
  return shown;
}

// The tensor as a matrix: all dims but the last are rows.
Rows values_of(const Tensor& x) {
  const std::int64_t columns = x.ndim() == 0 ? 1 : x.size(-1);
  const std::int64_t num_rows = columns == 0 ? 0 : x.numel() / columns;
  const std::vector<double> values = x.to_vector<double>();
  const auto text_of = [&](double value) {
    return is_floating(x.dtype()) ? fmt::format("{:.4g}", value)
                                  : fixed(value, 0);
  };
  Rows rows;
  for (const std::int64_t i : shown_of(num_rows)) {
    rows.emplace_back();
    for (const std::int64_t j : shown_of(columns)) {
      const auto at = static_cast<std::size_t>(i * columns + j);
      rows.back().push_back(i < 0 || j < 0 ? "..." : text_of(values[at]));
    }
  }
  return rows;
}

Picture tensor_picture(const Tensor& x) {
  if (!x.defined()) return {"an undefined tensor", "", ""};
  const std::string title =
      fmt::format("{} {} on {}", dtype_name(x.dtype()), shape_text(x.shape()),
                  x.device().name());
  if (x.is_meta()) return {title + ": a shape without values", "", ""};
  const Rows rows = values_of(x);
  return {title + "\n" + text_table::align(rows), "",
          "<p>" + svg::escape(title) + "</p>\n" + table_html(rows, "td")};
}

// --- Images ------------------------------------------------------------------

std::string attribute(const std::string& svg, const std::string& name) {
  const std::size_t begin = svg.find(name + "=\"") + name.size() + 2;
  return svg.substr(begin, svg.find('"', begin) - begin);
}

std::string image_html(const std::string& svg) {
  return fmt::format(
      "<img alt=\"{}\" width=\"{}\" src=\"data:image/svg+xml;base64,{}\"/>\n",
      attribute(svg, "aria-label"), attribute(svg, "width"), svg::base64(svg));
}

// --- Claims ------------------------------------------------------------------

std::string verdict_text(const std::string& verdict,
                         const std::string& otherwise) {
  return verdict == "passed"   ? "equal"
         : verdict == "failed" ? "DIFFERENT"
                               : otherwise;
}

Row claim_row(const std::string& who, const std::string& what,
              const Claim& claim) {
  const std::string verdict = verdict_of({claim});
  return {who, what, claim.predicted < 0 ? "" : fixed(claim.predicted, 0),
          fixed(claim.counted, 0),
          claim.predicted == kNoClaim ? "" : verdict_text(verdict, verdict)};
}

bool is_same(const RankReport& a, const RankReport& b) {
  return a.bytes == b.bytes && a.held == b.held &&
         a.peak_total.simulated == b.peak_total.simulated;
}

void add_rank_rows(const Report& report, Rows& rows) {
  for (std::size_t first = 0; first < report.ranks.size();) {
    const RankReport& rank = report.ranks[first];
    std::size_t end = first + 1;
    while (end < report.ranks.size() && is_same(rank, report.ranks[end])) ++end;
    const std::string who = end == first + 1
                                ? fmt::format("rank {}", first)
                                : fmt::format("ranks {}-{}", first, end - 1);
    rows.push_back(claim_row(who, "bytes sent", rank.bytes));
    for (std::size_t k = 0; k < rank.held.size(); ++k) {
      const Claim& held = rank.held[k];
      if (held.counted == 0 && held.predicted <= 0) continue;
      rows.push_back(
          claim_row(who, held_name(static_cast<MemoryKind>(k)), held));
    }
    // Counted values include scratch memory, which depends on the machine
    if (rank.peak_total.simulated > 0) {
      rows.push_back({who, "peak of all kinds", "",
                      fixed(rank.peak_total.simulated, 0), "simulated"});
    }
    first = end;
  }
}

// --- Ledger ------------------------------------------------------------------

Row call_of(const CommRecord& record) {
  return {comm_op_name(record.op),
          fmt::format("{} of {}", record.group, record.group_size),
          record.label,
          fmt::format("{} {}", record.numel, dtype_name(record.dtype))};
}

}  // namespace

Picture table(const Rows& rows) {
  return {text_table::align(rows), "", table_html(rows)};
}

Picture claims(const Report& report) {
  Rows rows = {{"", "", "predicted", "counted", ""}};
  if (!report.losses.empty()) {
    rows.push_back({"loss", "first and last", "",
                    fixed(report.losses.front(), 4) + ", " +
                        fixed(report.losses.back(), 4),
                    report.not_finite});
  }
  if (report.parity.checked) {
    // Shows the tolerance: whether rounding differs depends on the machine
    rows.push_back({"numbers", "like one device's", "",
                    report.parity.tolerance == 0
                        ? "every bit"
                        : fmt::format("within {:.0e}", report.parity.tolerance),
                    report.parity.passed ? "equal" : "DIFFERENT"});
  }
  add_rank_rows(report, rows);
  const VirtualTime& time = report.time;
  if (!time.cluster.empty()) {
    const auto microseconds = [](double seconds) {
      return seconds < 0 ? "" : fmt::format("{:.1f} us", 1e6 * seconds);
    };
    rows.push_back(
        {"time", "virtual step on " + time.cluster,
         microseconds(time.closed_form_s),
         microseconds(time.step_s > 0 ? time.step_s : time.simulated_step_s),
         verdict_text(time_verdict(time), "simulated")});
  }
  return table(rows);
}

Picture ledger(const std::vector<CommRecord>& records) {
  Rows rows = {{"call", "ranks", "for", "elements", "times", "bytes sent"}};
  for (std::size_t i = 0; i < records.size();) {
    const Row call = call_of(records[i]);
    double bytes = 0;
    std::size_t end = i;
    for (; end < records.size() && call_of(records[end]) == call; ++end) {
      bytes += wire_bytes(records[end]);
    }
    rows.push_back(call);
    rows.back().push_back(std::to_string(end - i));
    rows.back().push_back(fixed(bytes, 0));
    i = end;
  }
  rows.push_back({"all calls", "", "", "", std::to_string(records.size()),
                  fixed(wire_bytes(records), 0)});
  return table(rows);
}

std::string fixed(double value, int digits) {
  return fmt::format("{:.{}f}", value, digits);
}

std::string verdict(const std::string& exercise, bool is_right) {
  return exercise + (is_right ? ": right\n" : ": not yet\n");
}

std::string verdict(const std::string& exercise, double answer, double right) {
  return verdict(exercise, std::abs(answer - right) <= 1e-9 * std::abs(right));
}

Picture holders(const std::string& title,
                const std::vector<dtensor::Held>& all) {
  return {dtensor::picture_text(all), dtensor::picture_svg(title, all), ""};
}

}  // namespace shardbook::notebook

namespace shardbook {

namespace pictures {
nl::json mime_bundle_repr(const Picture& picture) {
  nl::json bundle;
  bundle["text/plain"] = picture.text;
  if (!picture.svg.empty()) {
    bundle["image/svg+xml"] = picture.svg;
    bundle["text/html"] = notebook::image_html(picture.svg);
  }
  if (!picture.html.empty()) bundle["text/html"] = picture.html;
  return bundle;
}
}  // namespace pictures

nl::json mime_bundle_repr(const Tensor& x) {
  return mime_bundle_repr(notebook::tensor_picture(x));
}
nl::json mime_bundle_repr(const Topology& topology) {
  return mime_bundle_repr(notebook::mesh(topology));
}
nl::json mime_bundle_repr(const Report& report) {
  return mime_bundle_repr(notebook::claims(report));
}
}  // namespace shardbook
