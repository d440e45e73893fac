#pragma once

// What the program prints besides its report.

#include <string>
#include <vector>

#include "chapters/06_1f1b/trainer.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// The figure, where F takes 1 and B 2 (I and W 1 each), and what follows from
/// it: idle time, sets of activations, versions of the weights.
void print_schedule(const Schedule& schedule);
/// What --print-schedule and --write-schedule ask for. Throws Error where the
/// file cannot be written, or not read again.
void show_schedule(const Plan& plan, const TrainerOptions& how);

/// How old the weights were whose gradient went into each of the first updates,
/// by rank, for schedules that do not flush; "" for others. Collective; the
/// text is on rank 0.
std::string staleness_table(const std::vector<VersionUse>& uses,
                            ProcessGroup& pp);

}  // namespace shardbook::pipeline
