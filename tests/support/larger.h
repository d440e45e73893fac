#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace shardbook {

/// The larger of two differences; NaN where either is, which std::max would
/// lose.
inline double larger(double a, double b) {
  return std::isnan(b) ? b : std::max(a, b);
}

/// The largest difference between elements; infinite for lists of other lengths.
inline double largest_gap(const std::vector<double>& a,
                          const std::vector<double>& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = larger(most, std::abs(a[i] - b[i]));
  }
  return most;
}

}  // namespace shardbook
