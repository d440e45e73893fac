#pragma once

// One step of a run as pictures without scripts: the lanes of each rank, and
// how full its memory is. report.html draws the same view with timeline.js,
// which can zoom.

#include <string>
#include <utility>
#include <vector>

#include "sim/timeline_step.h"

namespace shardbook {

/// The classes of events (sim::class_of) that a view has, each with its title.
std::vector<std::pair<std::string, std::string>> classes_of(
    const sim::StepView& view);
/// The kinds of memory that a view has, each as "kind-NAME" with its name and
/// the most bytes that it had.
std::vector<std::pair<std::string, std::string>> memory_classes_of(
    const sim::StepView& view);
/// The most bytes of all kinds at one time.
double memory_peak(const sim::RankGroup& group);

/// Lanes of at most `max_groups` groups of ranks that differ. Numbers in boxes
/// are micro-batches.
std::string timeline_svg(const sim::StepView& view, int max_groups = 8);
/// Memory in use over the same time, by kind.
std::string memory_svg(const sim::StepView& view, int max_groups = 4);

}  // namespace shardbook
