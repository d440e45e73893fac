#pragma once

// The search: all legal plans, bounds for each, and an exact prediction for
// those that the bounds do not rule out.
//
// 1. Enumerate degrees, ZeRO stages, micro-batches, schedules, recomputation;
// the hybrid chapter rejects those that it cannot run.
// 2. Bounds on the time of each: of its operations; then, for a plan whose bound is
// the lowest, of its blocks on shapes, and of all its layers.
// 3. Predict the plan with the lowest bound where that is the last; stop at the
// first bound that is slower than the best few so far. So are all others.
//
// The bounds are below every prediction, so the result is the same as by
// predicting every plan (prunes = false).

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/planner/plan.h"

namespace shardbook::planner {

/// Called now and then with how many legal plans are settled, and of how many.
using Progress = std::function<void(std::int64_t done, std::int64_t all)>;

struct SearchOptions {
  int top = 5;                ///< how many plans are kept
  bool prunes = true;         ///< false: every legal plan is predicted
  bool keeps_points = false;  ///< every legal plan with what was known of it
  Progress progress = nullptr;
};

/// How far a legal plan came.
struct Point {
  enum Outcome { kPredicted, kBound, kDoesNotFit };
  Plan plan;
  /// Seconds of a step: at least so many, unless it was predicted. Bytes of a
  /// device: at least so many, until its memory was counted.
  double seconds = 0, bytes = 0;
  Outcome outcome = kPredicted;
};

/// Plans that were rejected for one reason, with an example.
struct Rejection {
  std::int64_t count = 0;
  std::string example;
};

struct PlanResult {
  /// The fastest that fit, the best first.
  std::vector<Prediction> best;
  std::int64_t num_plans = 0;                ///< legal ones
  std::int64_t num_predicted = 0;            ///< exactly
  std::map<std::string, Rejection> illegal;  ///< by the option that was refused
  Rejection does_not_fit;   ///< its example comes closest to fitting
  double least_excess = 0;  ///< bytes, of that one
  Rejection slower_bound;   ///< could not be faster than the plans shown
  Rejection slower;         ///< predicted, and slower
  std::vector<Point> points;
};

/// All legal plans; `illegal` counts the others.
std::vector<Plan> plans_of(const PlanRequest& request,
                           std::map<std::string, Rejection>* illegal = nullptr);

/// Throws Error for an impossible request: an unknown model, a batch that no
/// degree divides, more devices than the cluster has.
PlanResult search(const PlanRequest& request,
                  const SearchOptions& options = {});
void check_request(const PlanRequest& request);

/// One way of splitting, alone or combined with others.
struct Strategy {
  std::string name;   ///< "DDP", "ZeRO-3", "TP x PP"
  PlanResult result;  ///< of its plans alone
};
/// The best plan of each strategy that the request allows.
std::vector<Strategy> search_by_strategy(const PlanRequest& request,
                                         SearchOptions options = {});

}  // namespace shardbook::planner
