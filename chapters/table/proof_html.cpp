// "Proof" of report.html, the runs that trained, and what is compared: sets of
// runs, and the runs of ./shardbook compare.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/page.h"
#include "chapters/table/table.h"
#include "core/how_many.h"

namespace shardbook::table::internal {
namespace {

// A value with the sign of its claim, if it was measured.
std::string claim_cell(const Claim& claim, const std::string& value) {
  const bool plain =
      claim.verdict == Verdict::kNotMeasured && !claim.value.empty();
  return fmt::format("<td>{} {}</td>", plain ? "" : sign_html(claim.verdict),
                     value);
}

std::string proof_rows(const Chosen& trained, const Runs& runs) {
  const Unit sent = unit_of(pictures::bytes_unit, trained, sent_per_step);
  const auto held_of = [](const ProgramRun& run) { return run.held_bytes; };
  const auto peak_of = [](const ProgramRun& run) { return run.peak_bytes; };
  const Unit held = unit_of(pictures::bytes_unit, trained, held_of);
  const Unit peak = unit_of(pictures::bytes_unit, trained, peak_of);
  const Unit step = unit_of(pictures::seconds_unit, trained, step_of);
  std::string text = open_table("Proof", {{"strategy"},
                                          {"world"},
                                          {"loss"},
                                          {"numbers"},
                                          {"sent", sent.name},
                                          {"held", held.name},
                                          {"peak memory", peak.name},
                                          {"step", step.name}});
  for (const ProgramRun* run : trained) {
    const std::string loss =
        run->loss.empty() ? "\u2013"
                          : run->loss.front() + " \u2192 " + run->loss.back();
    const bool on_the_wall = !run->virtual_run && run->wall_step_s >= 0;
    text += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td>",
                        link_to(*run, runs), escape(world_name(*run)), loss) +
            claim_cell(run->numbers, escape(run->numbers.value)) +
            claim_cell(run->bytes, number_text(sent_per_step(*run), sent)) +
            claim_cell(run->memory, number_text(run->held_bytes, held)) +
            "<td>" + number_text(run->peak_bytes, peak) + "</td>" +
            claim_cell(run->time, number_text(step_of(*run), step) +
                                      (on_the_wall ? " wall" : "")) +
            "</tr>\n";
  }
  return text + kCloseTable;
}

}  // namespace

std::string proof_html(const Runs& runs) {
  const Chosen trained = trained_runs(runs);
  if (trained.empty()) return "";
  const ClaimCount claims = count_claims(trained);
  const auto num_failed = static_cast<std::size_t>(std::ranges::count_if(
      trained,
      [](const ProgramRun* run) { return count_claims(*run).failed > 0; }));
  const bool holds = num_failed == 0;
  return fmt::format(
             "<section id=\"proof\"><details{}><summary><h2>Proof: {} of {}"
             "</h2> <span class=\"about\">{} {}, each "
             "predicted by a formula and counted by the program</span>"
             "</summary><p class=\"about\">Small models, trained here; virtual "
             "time on the cluster textbook.</p>\n",
             holds ? "" : " open", trained.size() - num_failed,
             how_many(trained.size(), "run") +
                 (trained.size() == 1 ? " holds" : " hold"),
             sign_html(holds ? Verdict::kPassed : Verdict::kFailed),
             (holds ? "all "
                    : fmt::format("{} of ", claims.measured - claims.failed)) +
                 how_many(claims.measured, "claim")) +
         proof_rows(trained, runs) + other_trainings_html(trained) +
         "</details></section>\n";
}

std::string comparison_html(const Runs& runs) {
  if (!are_sets(runs)) return "";
  const Chosen all = pointers_to(runs);
  const Unit step = unit_of(pictures::seconds_unit, all, step_of);
  const Unit sent = unit_of(pictures::bytes_unit, all, sent_per_step);
  const Unit peak =
      unit_of(pictures::bytes_unit, all,
              [](const ProgramRun& run) { return run.peak_bytes; });
  std::string text =
      "<section id=\"comparison\"><h2>Compared</h2><p class=\"about\">In "
      "brackets: the ratio to the first set.</p>\n" +
      open_table("Compared", {{"run"},
                              {"set"},
                              {"step", step.name},
                              {"peak memory", peak.name},
                              {"sent", sent.name},
                              {"idle", "%"}});
  for (const Chosen& line : compare_sets(runs)) {
    const ProgramRun& first = *line.front();
    for (const ProgramRun* run : line) {
      const auto cell = [&](double value, double base, Unit unit) {
        text += "<td>" + number_text(value, unit) +
                (run != &first && value >= 0 && base > 0
                     ? fmt::format(" ({:.2f})", value / base)
                     : "") +
                "</td>";
      };
      text += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td>",
                          link_to(*run, runs), escape(run->set));
      cell(step_of(*run), step_of(first), step);
      cell(run->peak_bytes, first.peak_bytes, peak);
      cell(sent_per_step(*run), sent_per_step(first), sent);
      text += run->virtual_run ? fmt::format("<td>{:.1f}</td></tr>\n",
                                             100 * run->virtual_run->idle_share)
                               : "<td>\u2013</td></tr>\n";
    }
  }
  return text + kCloseTable + other_trainings_html(all) + "</section>\n";
}

std::string compared_html(const Runs& runs) {
  const ComparedTable table = compare_runs(runs, marks_of(/*is_utf8=*/true));
  std::vector<Head> heads = {{"strategy"}};
  for (const ComparedColumn& column : table.columns) {
    const bool is_short = column.name == "peak";
    heads.push_back({is_short ? "peak memory" : column.name, column.unit});
  }
  std::string text =
      "<section id=\"compared\"><h2>Compared</h2><p class=\"about\">" +
      escape(table.setting) + "</p>\n" + open_table("Compared", heads);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    text += "<tr><th scope=\"row\">" + link_to(runs[i], runs) + "</th>";
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
  return text + "</p>" + other_trainings_html(pointers_to(runs)) +
         "</section>\n";
}

}  // namespace shardbook::table::internal
