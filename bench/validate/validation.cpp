#include "bench/validate/validation.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

namespace shardbook::validate {
namespace {

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// "6 x no chapter joins tensor and pipeline parallelism yet, 1 x ...".
std::string reasons(const Validation& validation) {
  std::map<std::string, int> counts;
  for (const auto& [row, reason] : validation.not_expressed) ++counts[reason];
  std::string text;
  for (const auto& [reason, count] : counts) {
    text += fmt::format("{}{} x {}", text.empty() ? "" : ", ", count, reason);
  }
  return text;
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
  result.contests = judge_contests(all, result.kind->lower_is_better);
  const Aim& aim = result.kind->aim;
  switch (aim.kind) {
    case AimKind::kDigits:
      result.meets_aim =
          result.num_as_printed == static_cast<int>(result.outcomes.size());
      break;
    case AimKind::kWorst:
      result.meets_aim = result.aimed_worst <= aim.limit;
      break;
    case AimKind::kMean:
      result.meets_aim = result.aimed_mape <= aim.limit;
      break;
    case AimKind::kOrder:
      result.meets_aim = result.contests.spearman >= aim.limit;
      break;
  }
  result.meets_aim = result.meets_aim && result.num_aimed_at > 0;
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
  std::string text =
      fmt::format("{} ({})\n", file_name(validation.file), kind.name);
  for (const Outcome& outcome : validation.outcomes) {
    text += fmt::format("  {:<58} {:>9.5g} {:>9.5g} {:<15} {:>+6.1f} %  {}\n",
                        outcome.row, outcome.pair.predicted,
                        outcome.pair.published, outcome.unit,
                        100 * relative_error(outcome.pair), outcome.trust);
  }
  for (const auto& [row, reason] : validation.not_expressed) {
    text += fmt::format("  {}: not expressed: {}\n", file_name(row), reason);
  }
  if (!validation.outcomes.empty()) {
    text += fmt::format(
        "  {} predictions: MAPE {:.1f} %; one constant for all rows: {:.1f} "
        "%\n",
        validation.outcomes.size(), 100 * validation.mape,
        100 * validation.null_mape);
  }
  const auto aimed = static_cast<std::size_t>(validation.num_aimed_at);
  if (aimed > 0 && aimed < validation.outcomes.size()) {
    text += fmt::format(
        "  the {} rows of the aim: MAPE {:.1f} %, at most {:.1f} %\n", aimed,
        100 * validation.aimed_mape, 100 * validation.aimed_worst);
  }
  const Contests& contests = validation.contests;
  if (contests.count > 0) {
    text += fmt::format(
        "  {} rows compete for {} pieces of work: Spearman {:.2f}, regret of "
        "the picked plan {:.1f} %\n",
        contests.rows, contests.count, contests.spearman,
        100 * contests.regret);
  }
  if (!validation.not_expressed.empty()) {
    text += fmt::format("  {} rows not expressed: {}\n",
                        validation.not_expressed.size(), reasons(validation));
  }
  if (!kind.note.empty()) text += "  note: " + kind.note + "\n";
  text += fmt::format("  aim: {}: {}\n", kind.aim.text,
                      validation.outcomes.empty() ? "nothing to judge"
                      : validation.meets_aim      ? "met"
                                                  : "missed");
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
