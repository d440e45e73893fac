#pragma once

// The search: all plans that are legal, bounds for each, and an exact
// prediction for those that the bounds leave.
//
// 1. Enumerate degrees, ZeRO stages, micro-batches, schedules, recomputation; the
// hybrid chapter refuses what it does not run.
// 2. Order the plans by the time that they cannot beat.
// 3. Predict one after the other; stop at the first whose bound is slower than
// the best few so far. So are all after it.
//
// The bounds are below every prediction, so the result is that of predicting
// every plan (prunes = false).

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/planner/plan.h"

namespace shardbook::planner {

struct SearchOptions {
  int top = 5;  ///< how many plans are kept
  /// Only plans for which it is true; empty: all.
  std::function<bool(const Plan&)> keeps;
  bool prunes = true;  ///< false: every legal plan is predicted
};

/// Plans that lost for one reason, with an example.
struct Lost {
  std::int64_t count = 0;
  std::string example;
};

struct Answer {
  /// The fastest that fit, the best first.
  std::vector<Prediction> best;
  std::int64_t num_plans = 0;           ///< legal ones
  std::int64_t num_predicted = 0;       ///< exactly
  std::map<std::string, Lost> illegal;  ///< by the option that was refused
  Lost does_not_fit;        ///< the example is the one that exceeds least
  double least_excess = 0;  ///< bytes, of that one
  Lost slower_bound;        ///< could not be faster than the plans shown
  Lost slower;              ///< predicted, and slower
};

/// All legal plans; `illegal` counts the others.
std::vector<Plan> plans_of(const Question& question,
                           std::map<std::string, Lost>* illegal = nullptr);

/// Throws Error for a question without sense: an unknown model, a batch that no
/// degree divides, more devices than the cluster has.
Answer search(const Question& question, const SearchOptions& options = {});
void check_question(const Question& question);

/// One way of splitting, without the others or with them.
struct Strategy {
  std::string name;  ///< "DDP", "ZeRO-3", "TP x PP"
  Answer answer;     ///< of its plans alone
};
/// The best plan of each strategy that the question allows.
std::vector<Strategy> search_by_strategy(const Question& question,
                                         SearchOptions options = {});

/// Runs the plan in the hybrid chapter, on shapes, and sets what it confirms.
void confirm(const Question& question, Prediction& prediction);
/// Whether that is affordable: few different ranks, and a plan that the chapter
/// itself runs.
bool can_confirm(const Question& question, const Plan& plan);

}  // namespace shardbook::planner
