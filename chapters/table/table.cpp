#include <fmt/format.h>

#include <algorithm>

#include "chapters/table/table.h"

namespace shardbook::table {
namespace {

using Row = std::vector<std::string>;

// What a terminal can show.
struct Marks {
  const char* passed;
  const char* failed;
  const char* to;     // between the first and the last loss
  const char* times;  // between the backend and its ranks
};
constexpr Marks kUtf8Marks = {"\u2713", "\u2717", " \u2192 ", " \u00d7"};
constexpr Marks kAsciiMarks = {"ok", "no", " -> ", " x"};

constexpr const char* kLegend =
    "numbers: largest relative difference to one device. bytes sent: by the "
    "busiest rank.\n"
    "peak memory: of the fullest rank. step: virtual time; "
    "(wall time).\nA mark compares with what was predicted.\n";

// Columns on the screen: continuation bytes of UTF-8 take none.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(),
                    [](unsigned char c) { return (c & 0xC0) != 0x80; }));
}

std::string world_name(const ProgramRun& run, const Marks& marks) {
  if (run.world_size == 1) return "1 rank";
  return fmt::format("{}{}{}", run.backend, marks.times, run.world_size);
}

std::string claim_cell(const Claim& claim, const Marks& marks) {
  const std::string value = claim.value.empty() ? "-" : claim.value;
  if (claim.verdict == Verdict::kNotMeasured) return value;
  const bool passed = claim.verdict == Verdict::kPassed;
  return fmt::format("{} {}", passed ? marks.passed : marks.failed, value);
}

// Wall time stands in brackets: nothing is claimed about it.
std::string time_cell(const ProgramRun& run, const Marks& marks) {
  const std::string cell = claim_cell(run.time, marks);
  return run.virtual_run || run.time.value.empty() ? cell : "(" + cell + ")";
}

Row row_of(const ProgramRun& run, const Marks& marks) {
  return {
      run_name(run),
      world_name(run, marks),
      run.loss.empty() ? "-" : run.loss.front() + marks.to + run.loss.back(),
      claim_cell(run.numbers, marks),
      claim_cell(run.bytes, marks),
      claim_cell(run.memory, marks),
      time_cell(run, marks)};
}

std::string align(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], width(row[i]));
    }
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - width(row[i]) + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

// Calls visit(name, claim) for the four claims of a run.
template <typename Visit>
void for_each_claim(const ProgramRun& run, Visit visit) {
  visit("numbers", run.numbers);
  visit("bytes", run.bytes);
  visit("memory", run.memory);
  visit("time", run.time);
}

}  // namespace

ClaimCount count_claims(const std::vector<ProgramRun>& runs) {
  ClaimCount count;
  for (const ProgramRun& run : runs) {
    for_each_claim(run, [&](const char*, const Claim& claim) {
      if (claim.verdict != Verdict::kNotMeasured) ++count.measured;
      if (claim.verdict == Verdict::kFailed) ++count.failed;
    });
  }
  return count;
}

std::string format_table(const std::vector<ProgramRun>& runs, Charset charset) {
  const Marks& marks = charset == Charset::kUtf8 ? kUtf8Marks : kAsciiMarks;
  std::vector<Row> rows = {{"chapter", "world", "loss", "numbers", "bytes sent",
                            "peak memory", "step"}};
  std::string failures;
  for (const ProgramRun& run : runs) {
    rows.push_back(row_of(run, marks));
    for_each_claim(run, [&](const char* name, const Claim& claim) {
      if (claim.verdict != Verdict::kFailed) return;
      failures += fmt::format(
          "{} {}, {}: {}\n", marks.failed, run_name(run), world_name(run, marks),
          claim.failure.empty() ? fmt::format("the claim on {} failed", name)
                                : fmt::format("{}: {}", name, claim.failure));
    });
  }
  const auto [failed, claims] = count_claims(runs);
  const std::string verdict =
      claims == 0   ? "No claim was measured."
      : failed == 0 ? fmt::format("All {} claims hold.", claims)
                    : fmt::format("{} of {} claims failed:", failed, claims);
  return align(rows) + "\n" + kLegend + verdict + "\n" + failures;
}

}  // namespace shardbook::table
