#include "bench/validate/kinds.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "chapters/pictures/text_table.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

using pictures::text_table::width;
using pictures::text_table::wrap;

/// Rank of each value, from 0; equal ones share their mean.
std::vector<double> ranks_of(const std::vector<double>& values) {
  std::vector<double> sorted = values, ranks;
  std::ranges::sort(sorted);
  for (const double value : values) {
    const auto [begin, end] =
        std::equal_range(sorted.begin(), sorted.end(), value);
    ranks.push_back(
        static_cast<double>(begin - sorted.begin() + end - sorted.begin() - 1) /
        2);
  }
  return ranks;
}

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

double last_digit(const std::string& printed) {
  const std::size_t point = printed.find('.');
  if (point == std::string::npos) return 1;
  return std::pow(10.0, -static_cast<double>(printed.size() - point - 1));
}

bool is_printed_as(double value, double printed, double last_digit) {
  const double digits = std::round(printed / last_digit);
  // Decimal halves are not exact in binary
  constexpr double kHalf = 0.5 + 1e-9;
  return std::floor(value / last_digit + kHalf) == digits ||
         std::floor(value / last_digit + 1e-9) == digits;
}

double relative_error(const Pair& pair) {
  return pair.predicted / pair.published - 1;
}

double mape(const std::vector<Pair>& pairs) {
  if (pairs.empty()) return 0;
  double sum = 0;
  for (const Pair& pair : pairs) sum += std::abs(relative_error(pair));
  return sum / static_cast<double>(pairs.size());
}

double worst_error(const std::vector<Pair>& pairs) {
  double worst = 0;
  for (const Pair& pair : pairs) {
    worst = std::max(worst, std::abs(relative_error(pair)));
  }
  return worst;
}

// The error is piecewise linear in c, with a bend where c meets a row: the least
// is at a bend.
double null_mape(const std::vector<Pair>& pairs) {
  double least = pairs.empty() ? 0 : std::numeric_limits<double>::infinity();
  std::vector<Pair> guesses = pairs;
  for (const Pair& met : pairs) {
    const double c = met.published / met.null_scale;
    for (Pair& guess : guesses) guess.predicted = c * guess.null_scale;
    least = std::min(least, mape(guesses));
  }
  return least;
}

double spearman(const std::vector<double>& a, const std::vector<double>& b) {
  SB_CHECK(a.size() == b.size(), "spearman: ", a.size(), " values and ",
           b.size());
  const std::vector<double> x = ranks_of(a), y = ranks_of(b);
  const double mean = (static_cast<double>(a.size()) - 1) / 2;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) * (x[i] - mean);
    yy += (y[i] - mean) * (y[i] - mean);
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
}

Contests judge_contests(const std::vector<Pair>& pairs, bool lower_is_better) {
  struct Sides {
    std::vector<double> predicted, published;
  };
  std::map<std::string, Sides> contests;
  for (const Pair& pair : pairs) {
    if (pair.contest.empty()) continue;
    // Compare times: less is better
    const double power = lower_is_better ? 1 : -1;
    contests[pair.contest].predicted.push_back(std::pow(pair.predicted, power));
    contests[pair.contest].published.push_back(std::pow(pair.published, power));
  }
  Contests result;
  for (const auto& [name, sides] : contests) {
    if (sides.predicted.size() < 2) continue;
    const auto picked =
        std::ranges::min_element(sides.predicted) - sides.predicted.begin();
    const double best = *std::ranges::min_element(sides.published);
    result.count += 1;
    result.rows += static_cast<int>(sides.predicted.size());
    result.spearman += spearman(sides.predicted, sides.published);
    result.regret +=
        sides.published[static_cast<std::size_t>(picked)] / best - 1;
  }
  if (result.count > 0) {
    result.spearman /= result.count;
    result.regret /= result.count;
  }
  return result;
}

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
