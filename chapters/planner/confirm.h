#pragma once

// What the hybrid chapter itself makes of a plan.

#include "chapters/planner/plan.h"

namespace shardbook::planner {

/// Runs the plan in the hybrid chapter, on shapes, and adds its results.
void confirm(const PlanRequest& request, Prediction& prediction);
/// Whether confirm is affordable: few different ranks, and a plan that the
/// chapter itself runs.
bool can_confirm(const PlanRequest& request, const Plan& plan);

}  // namespace shardbook::planner
