#pragma once

// Schedules: the actions of every rank, in order, as data.
//
//   Schedule s = schedules::one_f_one_b(/*num_ranks=*/4, /*micro_batches=*/8);
//   check(s);  // throws the first broken rule
//   Replay r = replay(s, {.forward = 1, .backward = 2});
//   std::cout << draw(s, r);  // the figure of the paper
//
// A model is cut into stages, numbered in the order of the forward. A stage has
// a place: a rank, and one of that rank's chunks. A route is the list of places
// that a micro-batch passes through. Most schedules have one route for all:
//
//   1F1B           stage s on rank s
//   interleaved    stage s on rank s mod p, chunk s div p
//
// and some have several:
//
//   DualPipe       half of the micro-batches enter at the last rank
//   replicated     micro-batch b takes replica b mod R of a stage
//
// The lists contain no messages: an action waits for its inputs and sends its
// outputs along the route. They do not contain the one update of a schedule
// that flushes either: it follows the last action of every rank.

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace shardbook::pipeline {

/// Converts a rank, a chunk or a micro-batch to an index of a vector.
inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

enum class ActionKind {
  kForward,         ///< F: activations for the next stage
  kBackward,        ///< B: gradients of input and weights
  kBackwardInput,   ///< I: gradient of the input; a later W does the weights
  kBackwardWeight,  ///< W: the gradient of the weights that waited longest
  kUpdate,          ///< U: optimizer step of one chunk
};

/// Which weights a forward reads in a schedule with updates in its lists. The
/// backward of the micro-batch reads the same ones.
enum class VersionRule {
  kNewest,  ///< the weights of its stage's last update (PipeDream)
  /// The newest weights that contain no mini-batch beyond those in the weights
  /// that stage 0 read (PipeDream, vertical sync): stage 0's version, if all
  /// stages update equally often.
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

/// The place of a stage.
struct Place {
  int rank = 0;
  int chunk = 0;
};

/// The places of stages 0, 1, ... for the micro-batches of this route.
using Route = std::vector<Place>;

struct Schedule {
  std::string name;
  int num_ranks = 0;
  int num_stages = 0;
  int num_micro_batches = 0;
  /// The routes, and the index of each micro-batch's route.
  std::vector<Route> routes;
  std::vector<int> route_of;
  /// By rank, in order.
  std::vector<std::vector<Action>> actions;
  /// True: one version of the weights, and one update after the lists. False
  /// for PipeDream and 2BW, whose updates are in the lists.
  bool flushes = true;
  VersionRule versions = VersionRule::kNewest;
  /// The micro-batches whose gradients one optimizer step sums: all of them in
  /// a schedule that flushes. A stage on R ranks sums R times as many.
  int micro_batches_per_step = 0;

  /// For long runs without a flush: actions [begin, end) of each rank's list,
  /// its steady state, run `repeats` times more, each time `period`
  /// micro-batches later. So the lists do not grow with the run.
  struct Part {
    int begin = 0, end = 0;
  };
  std::vector<Part> steady;
  int period = 0, repeats = 0;

  /// Micro-batches of the whole run.
  int total_micro_batches() const {
    return num_micro_batches + repeats * period;
  }
  /// The micro-batch in the lists that stands for `micro_batch` of the run.
  int listed(int micro_batch) const {
    return micro_batch < num_micro_batches
               ? micro_batch
               : num_micro_batches - period +
                     (micro_batch - num_micro_batches) % period;
  }
  const Place& place(int micro_batch, int stage) const {
    return routes[static_cast<std::size_t>(route_of[at(listed(micro_batch))])]
                 [at(stage)];
  }
  /// The ranks that hold a stage, in the order of the routes.
  std::vector<int> owners(int stage) const;
  int num_replicas(int stage) const {
    return static_cast<int>(owners(stage).size());
  }
  /// The stages at the chunks of a rank; -1 at a chunk without one.
  std::vector<int> stages(int rank) const;
  /// The stage at a chunk of a rank; throws Error if there is none.
  int stage_at(int rank, int chunk) const;
  int num_chunks(int rank) const {
    return static_cast<int>(stages(rank).size());
  }
  /// Whether weights' gradients have actions of their own (I and W).
  bool splits_backward() const;
};

/// Iterates over a rank's list, and over its steady state as often as the
/// schedule says. Keeps a reference.
class ActionWalk {
 public:
  ActionWalk(const Schedule& schedule, int rank);
  bool is_at_end() const { return next_ == list_->size(); }
  /// The next action, with the micro-batch's number in the run.
  Action next();
  /// Its index in the list.
  int position() const { return static_cast<int>(next_); }
  /// Leaves out actions. The micro-batch numbers of later actions are reduced
  /// by those left out, without a gap.
  void leave_out(int num_actions, int num_micro_batches) {
    next_ += at(num_actions);
    shift_ -= num_micro_batches;
  }

 private:
  const std::vector<Action>* list_;
  Schedule::Part steady_;
  int period_, left_;
  std::size_t next_ = 0;
  int shift_ = 0;
};

/// The micro-batches of the lists in the order in which stage 0 sums their
/// gradients; rank after rank where several hold it.
std::vector<int> gradient_order(const Schedule& schedule);

/// "F0", "I3.1" for chunk 1, "U7": the letters above, and the micro-batch.
std::string to_string(const Action& action);

// --- Recomputation: which micro-batches keep only their stage's input --------
//
// A stage that drops what its forward computed keeps the input, and runs the
// forward again before the backward. Recomputation saves memory only if other
// micro-batches come in between: a micro-batch whose backward directly follows
// its forward would drop its graph and build the same one again.
//
//   GPipe    F0 F1 F2 B2 B1 B0     all but the last micro-batch
//   1F1B     F0 B0 F1 B1 F2 B2     nothing on the last stage
//            F0 F1 B0 F2 B1 B2     all on the stages before
//
// Chen et al. 2016; Huang et al. 2019, section 2.3; torchgpipe's `checkpoint`.

enum class Recompute {
  kAlways,
  /// All micro-batches but those whose backward directly follows on their rank.
  kExceptLast,
  kNever
};
/// "always", "except_last", "never"; throws Error for others.
Recompute recompute_from_name(const std::string& name);

/// The forwards of one rank whose graphs are dropped. Copies what it needs.
class Recomputed {
 public:
  Recomputed(const Schedule& schedule, int rank, Recompute mode);
  /// `micro_batch` is one of those in the schedule's lists.
  bool contains(int micro_batch, int chunk) const;

 private:
  Recompute mode_;
  /// Micro-batch and chunk of forwards whose backward is next.
  std::set<std::pair<int, int>> backward_is_next_;
};

// --- Building blocks of schedules --------------------------------------------

namespace parts {

using Actions = std::vector<Action>;

inline Action forward(int b, int chunk = 0) {
  return {ActionKind::kForward, b, chunk, false};
}
inline Action backward(int b, int chunk = 0) {
  return {ActionKind::kBackward, b, chunk, false};
}
inline Action backward_input(int b, int chunk = 0) {
  return {ActionKind::kBackwardInput, b, chunk, false};
}
inline Action backward_weight(int b, int chunk = 0) {
  return {ActionKind::kBackwardWeight, b, chunk, false};
}
inline Action update(int b) { return {ActionKind::kUpdate, b, 0, false}; }

/// A schedule without actions: stage s on rank s mod p, chunk s div p. Throws
/// Error for less than one rank or micro-batch.
Schedule empty(const std::string& name, int num_ranks, int micro_batches,
               int chunks = 1);

/// `warm_up` forwards, then pairs of one forward and one backward, then the
/// remaining backwards.
Actions warm_up_pairs_drain(const Actions& forwards, const Actions& backwards,
                            int warm_up);

}  // namespace parts

}  // namespace shardbook::pipeline
