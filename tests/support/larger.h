#pragma once

#include <algorithm>
#include <cmath>

namespace shardbook {

/// The larger of two differences; NaN where either is, which std::max would
/// lose.
inline double larger(double a, double b) {
  return std::isnan(b) ? b : std::max(a, b);
}

}  // namespace shardbook
