#pragma once

// Where a plan's memory and time come from: each part with its formula in digits,
// and the page that derives it. The parts of one kind add up to its total.

#include <string>
#include <vector>

#include "chapters/planner/search.h"

namespace shardbook::planner {

struct ExplainedPart {
  std::string kind;     ///< "optimizer", "compute"
  double value = 0;     ///< bytes, or seconds
  std::string formula;  ///< "8030261248 parameters x 12 bytes / 64 ranks"
  std::string page;     ///< "chapters/03_zero_fsdp/README.md#the-problem"
};

struct Explanation {
  std::vector<ExplainedPart> memory, time;
  std::vector<ExplainedPart> sent;  ///< kind: of the link
};
Explanation explain(const PlanRequest& request, const Prediction& prediction);

/// The best plan of the result, and why the next one lost: the first with other
/// degrees, or else the second. Empty where none fits.
std::string explain_text(const PlanRequest& request, const PlanResult& result);
/// The same as a JSON object {memory, time, sent, timeline, next}. timeline: null, or of
/// each stage the actions [kind, micro-batch, chunk, begin, end] and the bytes of
/// activations kept from a moment on; a long step's with fewer micro-batches.
std::string explain_json(const PlanRequest& request, const PlanResult& result);

}  // namespace shardbook::planner
