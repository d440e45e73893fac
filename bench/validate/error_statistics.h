#pragma once

// How good predictions are, and how good the simplest ones would have been.

#include <string>
#include <vector>

namespace shardbook::validate {

/// A published figure, and the prediction for it.
struct Pair {
  double predicted = 0;
  double published = 0;  ///< above 0
  /// The null model predicts c times this: 1 for a rate, the work for a time.
  double null_scale = 1;
  /// Rows of the same contest did the same work in different ways; empty:
  /// this row has no rivals.
  std::string contest = {};
};

/// predicted / published - 1.
double relative_error(const Pair& pair);
/// Mean absolute relative error, as a share; 0 for none.
double mape(const std::vector<Pair>& pairs);
/// The largest absolute relative error.
double worst_error(const std::vector<Pair>& pairs);
/// The smallest mape that predictions of c * null_scale have for any c.
double null_mape(const std::vector<Pair>& pairs);

/// Spearman's correlation of ranks; equal values share the mean of their
/// ranks. 0 when either side is constant.
double spearman(const std::vector<double>& a, const std::vector<double>& b);

/// Means over all contests of at least two rows.
struct Contests {
  int count = 0;
  int rows = 0;
  double spearman = 0;
  /// By what share the plan that the prediction picks is slower than the best
  /// measured plan.
  double regret = 0;
};
Contests judge_contests(const std::vector<Pair>& pairs, bool lower_is_better);

}  // namespace shardbook::validate
