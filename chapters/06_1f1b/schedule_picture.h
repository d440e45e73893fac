#pragma once

// Figures and tables that the program prints besides its report.

#include <string>
#include <vector>

#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Prints the figure, in which F takes 1 and B 2 (I and W 1 each), and its idle
/// time, sets of activations and versions of the weights.
void print_schedule(const Schedule& schedule);
/// Does --print-schedule and --write-schedule. Throws Error if the file cannot
/// be written, or could not be read again.
void show_schedule(const Plan& plan, const StrategyOptions& setup);

/// For schedules that do not flush ("" for others): the age of the weights in
/// forward and backward, by rank, for each of the first updates. Collective;
/// the text is on rank 0.
std::string staleness_table(const std::vector<VersionUse>& uses,
                            ProcessGroup& pp);

}  // namespace shardbook::pipeline
