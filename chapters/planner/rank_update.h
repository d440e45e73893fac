#pragma once

// What a rank does behind its last backward, as the hybrid chapter does: it sums
// gradients in buckets over the ranks with the same parameters, parts of sums over
// tp, and a tied table over two stages; then it squares and updates, and with
// ZeRO-1 gathers parameters.

#include <vector>

#include "chapters/planner/step.h"
#include "sim/cost_model.h"

namespace shardbook::planner {

/// Parameters that travel in one message.
struct SentBucket {
  double elements = 0;
  std::vector<double> parameters;  ///< elements of each
  bool is_expert = false, is_partial = false, is_tied = false;
};

/// Of a rank of the pipeline, in the order in which they leave. `runs`: all stages.
std::vector<SentBucket> buckets_of(const HybridJob& job,
                                   const std::vector<StageRun>& runs, int rank);

/// Seconds, one after the other.
struct RankUpdate {
  double sums = 0;     ///< over dp and cp, then over tp
  double tied = 0;     ///< over the first and the last stage
  double squares = 0;  ///< for the norm, with its sum over all ranks
  double issues = 0;   ///< of the host, for sums and squares
  double update = 0;
  double gathers = 0;
};

/// Of all ranks of the pipeline, computed once for jobs with the same parameters.
/// Stages 0 and 1.
const std::vector<RankUpdate>& rank_updates(const HybridJob& job,
                                            const sim::CostModel& costs,
                                            const std::vector<StageRun>& runs);

/// Whether two ranks have stages of the same parts.
bool has_stages_of(const HybridJob& job, const std::vector<StageRun>& runs,
                   int rank, int other);

}  // namespace shardbook::planner
