#include <fmt/format.h>

#include <map>
#include <sstream>

#include "chapters/pictures/text_table.h"
#include "chapters/table/run_set.h"
#include "chapters/table/table.h"
#include "sim/timeline_text.h"

namespace shardbook::table {
namespace {

using pictures::text_table::align;
using pictures::text_table::Row;

// The marks that a terminal can show.
struct Marks {
  const char* passed;
  const char* failed;
  const char* to;     // between the first and the last loss
  const char* times;  // between the backend and its ranks
};
constexpr Marks kUtf8Marks = {"\u2713", "\u2717", " \u2192 ", " \u00d7"};
constexpr Marks kAsciiMarks = {"ok", "no", " -> ", " x"};

constexpr const char* kProofLegend =
    "A mark compares the value with its formula. numbers: largest relative "
    "difference to one device.\n"
    "sent: bytes per step, by the busiest rank; broadcasts at the start are "
    "shared out over the steps.\n"
    "held: parameters, gradients and optimizer state after an update, and "
    "activations kept after a\n"
    "forward, of the fullest rank. time: a mark for the closed form of a step "
    "on the cluster textbook;\n"
    "elsewhere simulated; (wall time) without a cluster.\n";

constexpr const char* kBuysLegend =
    "Simulated (--backend sim). step: virtual time. speed-up: over one "
    "device; in brackets if the run on\n"
    "one device, or this one, does not fit in memory. memory: peak of the "
    "fullest device. sent: bytes\n"
    "per step over each kind of link, by all devices. idle: share of the step "
    "in which a device computes\nnothing.\n";

std::string claim_cell(const Claim& claim, const Marks& marks) {
  const std::string value = claim.value.empty() ? "-" : claim.value;
  if (claim.verdict == Verdict::kNotMeasured) return value;
  const bool passed = claim.verdict == Verdict::kPassed;
  return fmt::format("{} {}", passed ? marks.passed : marks.failed, value);
}

// These models are too small for their step times to mean anything, so only the
// mark of a closed form is shown. Wall time is in brackets, because no claim is
// made about it.
std::string time_cell(const ProgramRun& run, const Marks& marks) {
  if (run.time.verdict == Verdict::kPassed) return marks.passed;
  if (run.virtual_run || run.time.value.empty()) {
    return claim_cell(run.time, marks);
  }
  return "(" + run.time.value + ")";
}

Row row_of(const ProgramRun& run, const Marks& marks) {
  return {
      run_name(run),
      world_name(run, marks.times),
      run.loss.empty() ? "-" : run.loss.front() + marks.to + run.loss.back(),
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
std::string common_setting(const std::vector<const ProgramRun*>& runs) {
  std::map<std::string, std::size_t> count;
  for (const ProgramRun* run : runs) {
    if (run->setting.empty()) continue;
    ++count[run->setting + (run->samples.empty() ? "" : ", " + run->samples) +
            (run->steps == 0 ? "" : fmt::format(", {} steps", run->steps))];
  }
  for (const auto& [setting, number] : count) {
    if (2 * number > runs.size()) return setting;
  }
  return "";
}

std::string proof_table(const std::vector<const ProgramRun*>& runs,
                        const Marks& marks) {
  std::vector<Row> rows = {
      {"PROOF", "world", "loss", "numbers", "sent", "held", "time"}};
  for (const ProgramRun* run : runs) rows.push_back(row_of(*run, marks));
  const std::string setting = common_setting(runs);
  return align(rows) + "\n" +
         (setting.empty() ? ""
                          : "Trained here: " + setting +
                                ", unless the row says otherwise.\n") +
         kProofLegend + "\n";
}

std::string memory_cell(const ProgramRun& run) {
  if (run.peak_bytes < 0) return "-";
  const std::string peak = format_gigabytes(run.peak_bytes) + " GB";
  return fits(run) ? peak : peak + ", does not fit";
}

Row buys_row(const ProgramRun& run, const ProgramRun* one) {
  Row row = {"  " + run_name(run),
             fmt::format("{}", run.world_size),
             "",
             speed_up_text(run, one),
             memory_cell(run),
             links_text(run),
             ""};
  if (run.virtual_run) {
    row[2] = sim::seconds_text(run.virtual_run->step_s.counted);
    row[6] = fmt::format("{:.1f} %", 100 * run.virtual_run->idle_share);
  }
  for (std::string& cell : row) cell = cell.empty() ? "-" : cell;
  return row;
}

std::string buys_table(const std::vector<RunGroup>& groups) {
  std::vector<Row> rows = {{"WHAT IT BUYS", "devices", "step", "speed-up",
                            "memory", "sent", "idle"}};
  std::vector<std::string> titles;  // the titles above the rows
  for (const RunGroup& group : groups) {
    for (const ProgramRun* run : group.runs) {
      const bool first = run == group.runs.front();
      titles.push_back(
          !first ? ""
                 : "\n" + (group.title.empty() ? "" : group.title + "\n") +
                       setting_of(*run) + "\n");
      rows.push_back(buys_row(*run, yardstick(group)));
    }
  }
  // Titles may be wider than columns, so they are inserted afterwards.
  std::istringstream lines(align(rows));
  std::string text, line;
  std::getline(lines, line);
  text = line + "\n";
  for (const std::string& title : titles) {
    std::getline(lines, line);
    text += title + line + "\n";
  }
  return text + "\n" + kBuysLegend + "\n";
}

}  // namespace

ClaimCount count_claims(const ProgramRun& run) {
  ClaimCount count;
  for_each_claim(run, [&](const char*, const Claim& claim) {
    if (claim.verdict != Verdict::kNotMeasured) ++count.measured;
    if (claim.verdict == Verdict::kFailed) ++count.failed;
  });
  return count;
}

ClaimCount count_claims(const std::vector<ProgramRun>& runs) {
  ClaimCount count;
  for (const ProgramRun& run : runs) {
    const auto [failed, measured] = count_claims(run);
    count.failed += failed;
    count.measured += measured;
  }
  return count;
}

std::string format_claims(const std::vector<ProgramRun>& runs,
                          Charset charset) {
  const Marks& marks = charset == Charset::kUtf8 ? kUtf8Marks : kAsciiMarks;
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
  const auto [failed, claims] = count_claims(runs);
  const std::string verdict =
      claims == 0   ? "No claim was measured."
      : failed == 0 ? fmt::format("All {} claims hold.", claims)
                    : fmt::format("{} of {} claims failed:", failed, claims);
  return verdict + "\n" + failures;
}

std::string format_table(const std::vector<ProgramRun>& runs, Charset charset) {
  const Marks& marks = charset == Charset::kUtf8 ? kUtf8Marks : kAsciiMarks;
  const std::vector<const ProgramRun*> trained = trained_runs(runs);
  const std::vector<RunGroup> groups = simulated_groups(runs);
  return (trained.empty() ? "" : proof_table(trained, marks)) +
         (groups.empty() ? "" : buys_table(groups)) +
         format_claims(runs, charset);
}

std::string format_comparison(const std::vector<ProgramRun>& runs) {
  std::vector<Row> rows = {
      {"run", "set", "step", "peak memory", "sent per step", "idle"}};
  std::string last;
  for (const ComparedRuns& line : compare_sets(runs)) {
    last.clear();
    for (const ProgramRun* run : line.runs) {
      const std::string name = run_name(*run);
      rows.push_back({name == last ? "" : name, run->set});
      for (const auto& cell : compared_cells(*run, *line.runs.front())) {
        rows.back().push_back(cell.empty() ? "-" : cell);
      }
      last = name;
    }
  }
  return align(rows) +
         "\nIn brackets: the ratio to the first set. step: virtual "
         "time, or wall time without a cluster.\n";
}

}  // namespace shardbook::table
