#pragma once

// Schedules: what every rank does, in order, as data.
//
//   Schedule s = schedules::one_f_one_b(/*num_ranks=*/4, /*micro_batches=*/8);
//   check(s);  // throws the first broken rule
//   Replay r = replay(s, {.forward = 1, .backward = 2});
//   std::cout << draw(s, r);  // the figure of the paper
//
// A model is cut into stages, numbered along the way of the data. A stage lies
// at a place: a rank, and which of that rank's chunks. Most schedules have one
// way through the places, which all micro-batches take:
//
//   1F1B           stage s at rank s
//   interleaved    stage s at rank s mod p, chunk s div p
//
// and some have several:
//
//   DualPipe       half of the micro-batches enter at the last rank
//   replicated     micro-batch b takes replica b mod R of a stage
//
// Messages follow from the routes and are not in the list: an action waits for
// what it reads, and sends what it makes. Nor is the one update of a schedule
// that flushes: it follows the last action of every rank.

#include <string>
#include <vector>

namespace shardbook::pipeline {

enum class ActionKind {
  kForward,         ///< F: activations for the next stage
  kBackward,        ///< B: gradients of input and weights
  kBackwardInput,   ///< I: gradient of the input; that of the weights waits
  kBackwardWeight,  ///< W: the gradient of the weights that waited longest
  kUpdate,          ///< U: optimizer step of one chunk
};

/// Which weights a forward reads where updates come in between. The backward
/// reads the same ones.
enum class VersionRule {
  kNewest,  ///< those of the last update of its stage (PipeDream)
  /// The newest that have seen no mini-batch which stage 0's had not
  /// (PipeDream, vertical sync). Where all stages update equally often: stage
  /// 0's version.
  kFirstStage,
  kDelayOne,  ///< without the gradients of the batch before (2BW)
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  /// U: the last micro-batch whose gradient is in the step.
  int micro_batch = 0;
  int chunk = 0;
  /// Runs together with the action behind it (DualPipe's pairs).
  bool overlaps_next = false;
};

/// Where a stage lies.
struct Place {
  int rank = 0;
  int chunk = 0;
};

/// Places of stage 0, 1, ... on one way through the pipeline.
using Route = std::vector<Place>;

struct Schedule {
  std::string name;
  int num_ranks = 0;
  int num_stages = 0;
  int num_micro_batches = 0;
  /// The ways there are, and which of them each micro-batch takes.
  std::vector<Route> routes;
  std::vector<int> route_of;
  /// By rank, in order.
  std::vector<std::vector<Action>> actions;
  /// One version of the weights: all updates at the end. False for PipeDream
  /// and 2BW, where updates come in between, and are in the lists.
  bool flushes = true;
  VersionRule versions = VersionRule::kNewest;
  /// How many of them one optimizer step sums: all of them where it flushes.
  /// Stages that lie on R ranks take R times as many into an update.
  int micro_batches_per_step = 0;

  /// A long run without a flush: actions [begin, end) of each rank's list, its
  /// steady state, come `repeats` times more, `period` micro-batches later each
  /// time, so that the lists need not grow with the run.
  struct Part {
    int begin = 0, end = 0;
  };
  std::vector<Part> steady;
  int period = 0, repeats = 0;

  /// Micro-batches of the whole run.
  int total_micro_batches() const {
    return num_micro_batches + repeats * period;
  }
  /// The micro-batch of the lists that does what `micro_batch` of the run does.
  int listed(int micro_batch) const {
    return micro_batch < num_micro_batches
               ? micro_batch
               : num_micro_batches - period +
                     (micro_batch - num_micro_batches) % period;
  }
  const Place& place(int micro_batch, int stage) const {
    return routes[static_cast<std::size_t>(route_of[static_cast<std::size_t>(
        listed(micro_batch))])][static_cast<std::size_t>(stage)];
  }
  /// Ranks that hold a stage.
  int num_replicas(int stage) const;
  /// The stage that lies at a chunk of a rank; throws Error for none.
  int stage_at(int rank, int chunk) const;
  /// Chunks that a rank holds.
  int num_chunks(int rank) const;
};

/// Walks down a rank's list, its steady state as often as the schedule says.
/// Keeps a reference.
class Walk {
 public:
  Walk(const Schedule& schedule, int rank);
  bool is_at_end() const { return next_ == list_->size(); }
  /// With the number that the micro-batch has in the run.
  Action next();

 private:
  const std::vector<Action>* list_;
  Schedule::Part steady_;
  int period_, left_;
  std::size_t next_ = 0;
  int shift_ = 0;
};

/// "F0", "I3.1" for chunk 1, "U7": the letters above, and the micro-batch.
std::string to_string(const Action& action);

}  // namespace shardbook::pipeline
