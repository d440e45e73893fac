#pragma once

// One step of a run, cut out of the ranks' timelines and folded: ranks that do
// the same at the same times are kept once. For a run without flushes, it shows
// several steps of the steady state.
//
//   StepView view = last_step(timelines);     // 1024 ranks, 4 stages
//   view.groups.size();                       // 4
//   rank_list(view.groups[0].ranks);          // "ranks 0-255"
//
// Every picture of a timeline starts from here.

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "sim/timeline.h"

namespace shardbook::sim {

/// Ranks whose steps look alike, those that were not run included, and the step
/// of the first of them.
struct RankGroup {
  std::vector<int> ranks;  ///< ascending
  RankTimeline timeline;   ///< times count from the begin of the step
};

/// One step of all ranks.
struct StepView {
  int world_size = 0;
  double step_s = 0;  ///< length of the view
  int num_steps = 1;  ///< how many steps it shows
  std::vector<RankGroup> groups;
};

/// The last step of all ranks; the whole run where a rank has none.
///
/// The stages of a pipeline end a step one after the other. The view begins
/// when the last of them has ended the step before, or earlier where a rank has
/// begun to compute by then, and ends with the last rank. It shows what each
/// rank does in this step, and nothing of its steps before and after. Ranks
/// that do not flush drain at the end of a run, in steps without a forward: the
/// view then shows up to four whole steps before that, when every rank is busy.
///
/// Events that reach beyond the view end at its border, and memory starts with
/// what was in use when it begins. Two ranks are alike when queues, operations
/// and bytes are equal and times differ by at most a millionth of the step;
/// their peers do not matter.
///
/// Cost: ranks times groups, in comparisons that mostly end early.
StepView last_step(const std::vector<RankTimeline>& timelines);

/// How one queue spends the view, in shares that add up to 1. The states are
/// those of TimeSummary; `rest` is what is left.
struct QueueShares {
  double busy = 0;
  double exposed = 0;
  double bubble = 0;
  double rest = 1;
};
QueueShares queue_shares(const RankTimeline& timeline, const std::string& queue,
                         double step_s);

/// The class of an event in drawings: its category, "weights" for gradients of
/// weights that were deferred, "host".
std::string class_of(const TimelineEvent& event);
/// The classes that legends name, in their order.
struct EventClass {
  const char* name;
  const char* title;
};
constexpr std::array<EventClass, 9> kEventClasses = {
    {{"forward", "forward"},
     {"backward", "backward"},
     {"weights", "deferred weight gradients"},
     {"optimizer", "optimizer"},
     {"comm", "communication"},
     {"copy", "memory copy"},
     {"host", "host"},
     {"exposed", "exposed communication"},
     {"bubble", "bubble"}}};

/// Texts and files show at most this many groups of ranks that differ.
constexpr std::size_t kMostGroups = 8;
/// "3 more ranks are not shown": those in none of the first `num_shown` groups;
/// empty where all are shown.
std::string hidden_text(const StepView& view, std::size_t num_shown);

/// The micro-batch of an event, "3" of "weights of micro-batch 3, stage 5"; empty
/// where its label names none.
std::string micro_batch_of(const TimelineEvent& event);

/// Names of the queues that have events: "compute" first, then as they come.
std::vector<std::string> queue_names(const RankTimeline& timeline);

/// "rank 0", "ranks 0-3", "ranks 0-2, 5"; long lists end in "and 12 more".
std::string rank_list(const std::vector<int>& ranks);

/// Distance of round marks (1, 2 or 5 times a power of ten) that puts at most
/// `max_marks` of them on an axis from 0 to `length`; 0 for an empty axis.
double axis_distance(double length, int max_marks);

}  // namespace shardbook::sim
