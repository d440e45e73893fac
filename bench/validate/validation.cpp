#include "bench/validate/kinds.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "chapters/pictures/text_table.h"

namespace shardbook::validate {
namespace {

using pictures::text_table::width;
using pictures::text_table::wrap;

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// Lines such as "6 x no chapter joins tensor and pipeline parallelism yet".
std::string reasons(const Validation& validation) {
  std::map<std::string, int> counts;
  for (const auto& [row, reason] : validation.not_expressed) ++counts[reason];
  std::string text;
  for (const auto& [reason, count] : counts) {
    text += wrap(fmt::format("    {} x {}", count, reason), 6);
  }
  return text;
}

/// The unit of all rows; empty where they differ.
std::string common_unit(const Validation& validation) {
  std::set<std::string> units;
  for (const Outcome& outcome : validation.outcomes) units.insert(outcome.unit);
  return units.size() == 1 ? *units.begin() : "";
}

std::string number_text(double value) {
  return value < 1e5 ? fmt::format("{:.5g}", value)
                     : fmt::format("{:.0f}", value);
}

/// Numbers, and the first letter of how far they can be trusted. A long name has
/// lines of its own.
std::string row_lines(const Outcome& outcome, const std::string& common_unit) {
  constexpr std::size_t kNameColumns = 47;
  std::string name = "  " + outcome.row;
  if (common_unit.empty()) name += " [" + outcome.unit + "]";
  std::string text;
  if (width(name) > kNameColumns) text = wrap(std::exchange(name, ""), 4);
  return text + fmt::format("{:<{}} {:>10} {:>9} {:>+7.1f} % {}\n", name,
                            kNameColumns, number_text(outcome.pair.predicted),
                            number_text(outcome.pair.published),
                            100 * relative_error(outcome.pair),
                            outcome.trust[0]);
}

void judge(Validation& result) {
  std::vector<Pair> all, aimed;
  for (const Outcome& outcome : result.outcomes) {
    all.push_back(outcome.pair);
    if (outcome.is_aimed_at) aimed.push_back(outcome.pair);
    result.num_as_printed +=
        outcome.last_digit > 0 &&
        is_printed_as(outcome.pair.predicted, outcome.pair.published,
                      outcome.last_digit);
  }
  result.num_aimed_at = static_cast<int>(aimed.size());
  result.mape = mape(all);
  result.null_mape = null_mape(all);
  result.aimed_mape = mape(aimed);
  result.aimed_worst = worst_error(aimed);
  const bool lower_is_better =
      result.kind->lower_is_better ||
      (!result.outcomes.empty() && result.outcomes[0].lower_is_better);
  result.contests = judge_contests(all, lower_is_better);
  const Aim& aim = result.kind->aim;
  const bool reached =
      aim.kind == AimKind::kDigits
          ? result.num_as_printed == static_cast<int>(result.outcomes.size())
      : aim.kind == AimKind::kWorst ? result.aimed_worst <= aim.limit
      : aim.kind == AimKind::kMean  ? result.aimed_mape <= aim.limit
                                    : result.contests.spearman >= aim.limit;
  result.meets_aim = reached && result.num_aimed_at > 0;
}

}  // namespace

Validation validate(const Table& table) {
  Validation result;
  result.file = table.file;
  result.kind = &recognise(table.file, table.columns);
  for (const Row& row : table.rows) {
    try {
      for (Outcome& outcome : result.kind->predict(row)) {
        result.outcomes.push_back(std::move(outcome));
      }
    } catch (const NotExpressed& reason) {
      result.not_expressed.emplace_back(row.place(), reason.what());
    }
  }
  judge(result);
  return result;
}

std::string as_text(const Validation& validation) {
  const Kind& kind = *validation.kind;
  const std::string unit = common_unit(validation);
  std::string text =
      wrap(fmt::format("{} ({}){}{}", file_name(validation.file), kind.name,
                       unit.empty() ? "" : ", in ", unit));
  if (!validation.outcomes.empty()) {
    text += fmt::format("{:49}predicted published     error\n", "");
  }
  std::map<std::string, int> trust;
  for (const Outcome& outcome : validation.outcomes) {
    text += row_lines(outcome, unit);
    ++trust[outcome.trust];
  }
  for (const auto& [row, reason] : validation.not_expressed) {
    text +=
        wrap(fmt::format("  {}: not expressed: {}", file_name(row), reason), 4);
  }
  const auto add = [&](const std::string& line) {
    text += wrap("  " + line, 4);
  };
  if (!validation.outcomes.empty()) {
    add(fmt::format(
        "{} predictions: MAPE {:.1f} %; one constant for all rows: {:.1f} %",
        validation.outcomes.size(), 100 * validation.mape,
        100 * validation.null_mape));
    std::string counts;
    for (const auto& [word, count] : trust) {
      counts += fmt::format("{}{} {} ({})", counts.empty() ? "" : ", ", count,
                            word, word[0]);
    }
    add("trust: " + counts);
  }
  const auto aimed = static_cast<std::size_t>(validation.num_aimed_at);
  if (aimed > 0 && aimed < validation.outcomes.size()) {
    add(fmt::format("the {} rows of the aim: MAPE {:.1f} %, at most {:.1f} %",
                    aimed, 100 * validation.aimed_mape,
                    100 * validation.aimed_worst));
  }
  const Contests& contests = validation.contests;
  if (contests.count > 0) {
    add(
        fmt::format("{} rows compete for {} pieces of work: Spearman {:.2f}, "
                    "regret of the picked plan {:.1f} %",
                    contests.rows, contests.count, contests.spearman,
                    100 * contests.regret));
  }
  if (!validation.not_expressed.empty()) {
    text += fmt::format("  {} rows not expressed:\n{}",
                        validation.not_expressed.size(), reasons(validation));
  }
  if (!kind.note.empty()) add("note: " + kind.note);
  add(fmt::format("aim: {}: {}", kind.aim.text,
                  validation.outcomes.empty() ? "nothing to judge"
                  : validation.meets_aim      ? "met"
                                              : "missed"));
  return text;
}

std::string as_json(const Validation& validation) {
  using nlohmann::ordered_json;
  const Kind& kind = *validation.kind;
  ordered_json rows = ordered_json::array();
  for (const Outcome& outcome : validation.outcomes) {
    rows.push_back({{"row", outcome.row},
                    {"unit", outcome.unit},
                    {"predicted", outcome.pair.predicted},
                    {"published", outcome.pair.published},
                    {"null_scale", outcome.pair.null_scale},
                    {"error_percent", 100 * relative_error(outcome.pair)},
                    {"trust", outcome.trust}});
  }
  ordered_json not_expressed = ordered_json::array();
  for (const auto& [row, reason] : validation.not_expressed) {
    not_expressed.push_back({{"row", row}, {"reason", reason}});
  }
  ordered_json contests = nullptr;
  if (validation.contests.count > 0) {
    contests = {{"count", validation.contests.count},
                {"rows", validation.contests.rows},
                {"spearman", validation.contests.spearman},
                {"regret_percent", 100 * validation.contests.regret}};
  }
  const ordered_json object = {
      {"table", file_name(validation.file)},
      {"kind", kind.name},
      {"rows", rows},
      {"not_expressed", not_expressed},
      {"mape_percent", 100 * validation.mape},
      {"null_mape_percent", 100 * validation.null_mape},
      {"contests", contests},
      {"aim",
       {{"text", kind.aim.text},
        {"rows", validation.num_aimed_at},
        {"mape_percent", 100 * validation.aimed_mape},
        {"worst_percent", 100 * validation.aimed_worst},
        {"met", validation.meets_aim}}}};
  return object.dump(-1, ' ', false, ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace shardbook::validate
