#pragma once

// One step of a run as pictures without scripts: the lanes of each rank, and
// how full its memory is. A title states what the picture shows. report.html
// draws the same view with timeline.js, which can zoom.

#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/figure.h"
#include "sim/timeline_step.h"

namespace shardbook::pictures {

/// The classes of events (sim::class_of) that a view has, each with its title.
std::vector<std::pair<std::string, std::string>> classes_of(
    const sim::StepView& view);
/// The kinds of memory that a view has, each as "kind-NAME" with its name and
/// its peak in bytes.
std::vector<std::pair<std::string, std::string>> memory_classes_of(
    const sim::StepView& view);
/// The most bytes of all kinds at one time.
double memory_peak(const sim::RankGroup& group);
double memory_peak(const sim::StepView& view);

/// The last step: what each rank does, from left to right, in lanes; ranks that
/// do the same share one. Numbers in boxes are micro-batches.
Picture timeline(const std::string& title,
                 const std::vector<sim::RankTimeline>& timelines,
                 int max_groups = 8);
/// The memory in use during the last step, by kind, without the scratch memory
/// of kernels, which depends on the machine. The text has the peaks.
Picture memory(const std::string& title,
               const std::vector<sim::RankTimeline>& timelines,
               int max_groups = 4);

/// The timelines of one of several runs.
struct NamedTimelines {
  std::string name = "";
  std::vector<sim::RankTimeline> timelines = {};
};
/// The same for runs that are compared: one below the other, on one axis of
/// time, and one of bytes.
///
///   timelines("GPipe and 1F1B take as long",
///             {{"GPipe", a.timelines}, {"1F1B", b.timelines}});
Picture timelines(const std::string& title,
                  const std::vector<NamedTimelines>& runs, int max_groups = 8);
Picture memories(const std::string& title, std::vector<NamedTimelines> runs,
                 int max_groups = 4);

}  // namespace shardbook::pictures
