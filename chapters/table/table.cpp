#include "chapters/table/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <sstream>
#include <utility>

#include "chapters/pictures/text_table.h"
#include "chapters/table/run.h"
#include "core/how_many.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using pictures::text_table::align;
using pictures::text_table::kColumns;
using pictures::text_table::Row;
using pictures::text_table::width;
using pictures::text_table::wrap;

constexpr const char* kProofLegend =
    "A mark compares the value with its formula. numbers: largest relative "
    "difference to one device. sent: bytes per step, by the busiest rank; "
    "broadcasts at the start are shared out over the steps. held: parameters, "
    "gradients and optimizer state after an update, and activations kept after "
    "a forward, of the fullest rank. time: the closed form of a step on the "
    "cluster textbook; -: there is none.";

constexpr const char* kBuysLegend =
    "Simulated: --backend sim. A row begins with its number of devices. step: "
    "virtual time. speed-up: over one device; in brackets if one of the two "
    "runs does not fit in memory. memory: peak of the fullest device; !: does "
    "not fit. sent: bytes per step by all devices, and the kind of link that "
    "carries most of them. idle: share of the step in which a device computes "
    "nothing.";

constexpr const char* kOverviewLegend =
    "A row begins with its number of devices. speed-up: over one; in brackets "
    "if either run does not fit in memory (!). sent: per step, most over this "
    "link.";

constexpr const char* kProofsLegend =
    "differs: largest relative difference. claims: on numbers, bytes, memory, "
    "time.\n";

std::string claim_cell(const Claim& claim, const Marks& marks) {
  const std::string value = claim.value.empty() ? "-" : claim.value;
  if (claim.verdict == Verdict::kNotMeasured) return value;
  const bool passed = claim.verdict == Verdict::kPassed;
  return fmt::format("{} {}", passed ? marks.passed : marks.failed, value);
}

// These models are too small for their step times to mean anything: a mark says
// that the closed form holds.
std::string time_cell(const ProgramRun& run, const Marks& marks) {
  if (run.time.verdict == Verdict::kNotMeasured) return "-";
  const bool passed = run.time.verdict == Verdict::kPassed;
  return passed ? marks.passed : claim_cell(run.time, marks);
}

Row row_of(const ProgramRun& run, const Marks& marks) {
  return {run_name(run),
          world_name(run, marks.times),
          claim_cell(run.numbers, marks),
          claim_cell(run.bytes, marks),
          claim_cell(run.memory, marks),
          time_cell(run, marks)};
}

// Calls visit(name, claim) for the four claims of a run.
template <typename Visit>
void for_each_claim(const ProgramRun& run, Visit visit) {
  visit("numbers", run.numbers);
  visit("bytes", run.bytes);
  visit("memory", run.memory);
  visit("time", run.time);
}

// The setting that more than half of the runs have, if there is one.
std::string common_setting(const Chosen& runs) {
  std::map<std::string, std::size_t> count;
  for (const ProgramRun* run : runs) {
    if (run->setting.empty()) continue;
    ++count[run->setting + (run->samples.empty() ? "" : ", " + run->samples) +
            (run->steps == 0 ? "" : ", " + how_many(run->steps, "step"))];
  }
  for (const auto& [setting, number] : count) {
    if (2 * number > runs.size()) return setting;
  }
  return "";
}

std::string proof_table(const Chosen& runs, const Marks& marks) {
  std::vector<Row> rows = {
      {"PROOF", "world", "numbers", "sent", "held", "time"}};
  for (const ProgramRun* run : runs) rows.push_back(row_of(*run, marks));
  const std::string setting = common_setting(runs);
  return align(rows, kColumns) + "\n" +
         (setting.empty() ? ""
                          : wrap("Trained here: " + setting +
                                 ", unless the row says otherwise.")) +
         wrap(kProofLegend) + other_trainings_lines(runs) + "\n";
}

std::string memory_cell(const ProgramRun& run, const Marks& marks) {
  if (run.peak_bytes < 0) return "";
  return format_decimal_bytes(run.peak_bytes) +
         (fits(run) ? "" : marks.too_large);
}

// "147 TB nvlink".
std::string sent_cell(const VirtualRun& run) {
  double sum = 0, most = 0;
  std::string link;
  for (const sim::LinkBytes& each : run.links) {
    sum += each.bytes;
    if (each.bytes > most) link = each.link;
    most = std::max(most, each.bytes);
  }
  return sum > 0 ? format_decimal_bytes(sum) + " " + link : "";
}

Row buys_row(const ProgramRun& run, const ProgramRun* one, const Marks& marks) {
  // Names begin in one column: the gap gives a place to a fifth digit
  Row row = {
      fmt::format("{:<6}", fmt::format("{:4}", run.world_size)) + run_name(run),
      "",
      speed_up_text(run, one),
      memory_cell(run, marks),
      "",
      ""};
  if (run.virtual_run) {
    row[1] = sim::seconds_text(run.virtual_run->step_s.counted);
    row[4] = sent_cell(*run.virtual_run);
    row[5] = fmt::format("{:.1f} %", 100 * run.virtual_run->idle_share);
  }
  for (std::string& cell : row) cell = cell.empty() ? "-" : cell;
  return row;
}

// A table; titles[i], which may be wider than its columns, is above row i + 1.
std::string align_below(const std::vector<std::string>& titles,
                        const std::vector<Row>& rows) {
  std::istringstream lines(align(rows, kColumns));
  std::string text, line;
  std::getline(lines, line);
  text = line + "\n";
  for (const std::string& title : titles) {
    std::getline(lines, line);
    text += title + line + "\n";
  }
  return text;
}

std::string heading_of(const RunGroup& group, bool is_overview) {
  const ProgramRun& run = *group.runs.front();
  if (is_overview) return wrap(group.title + ": " + short_setting_of(run));
  return "\n" + (group.title.empty() ? "" : group.title + "\n") +
         wrap(setting_of(run));
}

std::string buys_table(const std::vector<RunGroup>& groups, const Marks& marks,
                       bool is_overview) {
  std::vector<Row> rows = {{"WHAT IT BUYS, simulated", "step", "speed-up",
                            "memory", "sent", "idle"}};
  std::vector<std::string> titles;  // the titles above the rows
  Chosen shown;
  for (const RunGroup& group : groups) {
    std::string title = heading_of(group, is_overview);
    for (const ProgramRun* run : group.runs) {
      if (is_overview && !run->is_in_overview) continue;
      titles.push_back(std::exchange(title, ""));
      rows.push_back(buys_row(*run, yardstick(group), marks));
      shown.push_back(run);
    }
  }
  const std::string text = align_below(titles, rows);
  return text +
         (is_overview ? wrap(kOverviewLegend) : "\n" + wrap(kBuysLegend)) +
         other_trainings_lines(shown) + "\n";
}

std::string with_ways(const std::string& name, std::size_t ways) {
  return ways > 1 ? fmt::format("{}, {} ways", name, ways) : name;
}

/// "03 ZeRO-1, ZeRO-2, ZeRO-3, FSDP", "13 Experts, 7 ways" or, if the names do
/// not fit, "06 1F1B, Interleaved, and more" or "14 hybrid_3d, 6 ways".
std::string strategies_of(const Chosen& runs, std::size_t columns) {
  std::vector<std::string> names, ideas;  // an idea: its name up to a comma
  for (const ProgramRun* run : runs) {
    const std::string name = run_name(*run);
    add_once(names, name);
    add_once(ideas, name.substr(0, name.find_first_of(",:")));
  }
  const std::string& chapter = runs.front()->chapter;
  const bool is_numbered = chapter.size() > 3 && chapter[2] == '_';
  const std::string number = is_numbered ? chapter.substr(0, 2) : "  ";
  const std::string all = fmt::format("{} {}", number, fmt::join(ideas, ", "));
  std::string text =
      names.size() == ideas.size() ? all : with_ways(all, names.size());
  while (width(text) > columns && ideas.size() > 1) {
    ideas.pop_back();
    text = fmt::format("{} {}, and more", number, fmt::join(ideas, ", "));
  }
  if (width(text) <= columns) return text;
  const std::string title = is_numbered ? chapter.substr(3) : chapter;
  return with_ways(number + " " + title, names.size());
}

/// "threads x8, gloo x2": the largest world of each backend.
std::string worlds_of(const Chosen& runs, const Marks& marks) {
  std::vector<std::string> worlds;
  for (const Chosen& same :
       group_by(runs, [](const ProgramRun& run) { return run.backend; })) {
    const auto largest =
        std::ranges::max_element(same, {}, &ProgramRun::world_size);
    worlds.push_back(world_name(**largest, marks.times));
  }
  return fmt::format("{}", fmt::join(worlds, ", "));
}

std::string claims_cell(const Chosen& runs, const Marks& marks) {
  const ClaimCount count = count_claims(runs);
  if (count.measured == 0) return "-";
  return fmt::format("{} {} of {}",
                     count.failed == 0 ? marks.passed : marks.failed,
                     count.measured - count.failed, count.measured);
}

std::string proofs(const Chosen& runs, const Marks& marks) {
  std::vector<Row> rows = {
      {"PROOF, trained here", "worlds", "differs", "claims"}};
  const std::vector<Chosen> chapters =
      group_by(runs, [](const ProgramRun& run) { return run.chapter; });
  for (const Chosen& chapter : chapters) {
    double difference = -1;
    for (const ProgramRun* run : chapter) {
      difference = std::max(difference, run->difference);
    }
    rows.push_back({"", worlds_of(chapter, marks),
                    difference < 0 ? "-" : format_difference(difference),
                    claims_cell(chapter, marks)});
  }
  // Names get what the other columns leave
  std::size_t others = 0;
  for (std::size_t i = 1; i < rows.front().size(); ++i) {
    std::size_t widest = 0;
    for (const Row& row : rows) widest = std::max(widest, width(row[i]));
    others += widest + 2;
  }
  for (std::size_t i = 0; i < chapters.size(); ++i) {
    rows[i + 1][0] = strategies_of(chapters[i], kColumns - others);
  }
  // The names with a * may have been left out
  const std::string table = align(rows, kColumns);
  const bool has_marks = table.find('*') != std::string::npos;
  return table + kProofsLegend + (has_marks ? other_trainings_lines(runs) : "");
}

// Step, peak memory, bytes sent per step and idle share, with the ratio to the run
// of the first set in brackets.
Row compared_row(const ProgramRun& run, const ProgramRun& first) {
  const auto cell = [&](double value, double base, const auto& name) {
    if (value < 0) return std::string("-");
    return name(value) + (&run != &first && base > 0
                              ? fmt::format(" ({:.2f})", value / base)
                              : "");
  };
  return {"  " + run.set, cell(step_of(run), step_of(first), sim::seconds_text),
          cell(run.peak_bytes, first.peak_bytes, format_bytes),
          cell(sent_per_step(run), sent_per_step(first), format_bytes),
          run.virtual_run
              ? fmt::format("{:.1f} %", 100 * run.virtual_run->idle_share)
              : "-"};
}

}  // namespace

Marks marks_of(bool is_utf8, bool has_colours) {
  const auto coloured = [&](int colour, const char* mark) {
    return has_colours ? fmt::format("\033[{}m{}\033[0m", colour, mark) : mark;
  };
  constexpr int kRed = 31, kGreen = 32;
  return {coloured(kGreen, is_utf8 ? "\u2713" : "ok"),
          coloured(kRed, is_utf8 ? "\u2717" : "no"), coloured(kRed, "!"),
          is_utf8 ? " \u00d7" : " x"};
}

std::string other_trainings_lines(const Chosen& runs) {
  const std::string text = other_trainings_text(runs);
  return text.empty() ? "" : wrap(text);
}

ClaimCount count_claims(const ProgramRun& run) {
  ClaimCount count;
  for_each_claim(run, [&](const char*, const Claim& claim) {
    if (claim.verdict != Verdict::kNotMeasured) ++count.measured;
    if (claim.verdict == Verdict::kFailed) ++count.failed;
  });
  return count;
}

ClaimCount count_claims(const Chosen& runs) {
  ClaimCount count;
  for (const ProgramRun* run : runs) {
    const auto [failed, measured] = count_claims(*run);
    count.failed += failed;
    count.measured += measured;
  }
  return count;
}

ClaimCount count_claims(const Runs& runs) {
  return count_claims(pointers_to(runs));
}

std::string format_claims(const Runs& runs, const Marks& marks) {
  std::string failures;
  for (const ProgramRun& run : runs) {
    for_each_claim(run, [&](const char* name, const Claim& claim) {
      if (claim.verdict != Verdict::kFailed) return;
      failures += fmt::format("{} {}, {}: {}\n", marks.failed, run_name(run),
                              world_name(run, marks.times),
                              claim.failure.empty()
                                  ? fmt::format("the claim on {} failed", name)
                                  : fmt::format("{}: {}", name, claim.failure));
    });
  }
  std::string text = verdict_text(count_claims(runs));
  text[0] = static_cast<char>(std::toupper(text[0]));
  return text + (failures.empty() ? "." : ":") + "\n" + failures;
}

std::string verdict_text(const ClaimCount& count) {
  const std::string claims = how_many(count.measured, "claim");
  if (count.measured == 0) return "no claim was measured";
  if (count.failed > 0) {
    return fmt::format("{} of {} failed", count.failed, claims);
  }
  return count.measured == 1 ? "the one claim holds"
                             : fmt::format("all {} hold", claims);
}

std::string format_table(const Runs& runs, const Marks& marks) {
  const Chosen trained = trained_runs(runs);
  const std::vector<RunGroup> groups = simulated_groups(runs);
  return (groups.empty() ? "" : buys_table(groups, marks, false)) +
         (trained.empty() ? "" : proof_table(trained, marks)) +
         format_claims(runs, marks);
}

std::string format_overview(const Runs& runs, const Marks& marks) {
  const Chosen trained = trained_runs(runs);
  const std::vector<RunGroup> groups = simulated_groups(runs);
  return (groups.empty() ? "" : buys_table(groups, marks, true)) +
         (trained.empty() ? "" : proofs(trained, marks)) +
         format_claims(runs, marks);
}

std::string format_comparison(const Runs& runs) {
  std::vector<Row> rows = {
      {"run", "step", "peak memory", "sent per step", "idle"}};
  std::vector<std::string> titles;  // names
  for (const Chosen& line : compare_sets(runs)) {
    std::string last;
    for (const ProgramRun* run : line) {
      const std::string name = run_name(*run) + "\n";
      titles.push_back(name == last ? "" : name);
      rows.push_back(compared_row(*run, *line.front()));
      last = name;
    }
  }
  return align_below(titles, rows) + "\n" +
         wrap(
             "In brackets: the ratio to the first set. step: virtual time, or "
             "wall time without a cluster.") +
         other_trainings_lines(pointers_to(runs));
}

}  // namespace shardbook::table
