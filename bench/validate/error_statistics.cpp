#include "bench/validate/error_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "core/check.h"

namespace shardbook::validate {
namespace {

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

}  // namespace

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

}  // namespace shardbook::validate
