#include "chapters/06_1f1b/schedules_zero_bubble.h"

#include <algorithm>
#include <limits>

#include "chapters/06_1f1b/internal/at.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/06_1f1b/schedules_parts.h"
#include "core/check.h"

namespace shardbook::pipeline::schedules {

using namespace parts;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Questions that the paper leaves to a search.
struct Variant {
  bool forwards_late = false;  ///< one more F though the first I then waits
  bool alternates = false;     ///< F after I even when the next I is ready
  bool fills_small = false;    ///< W in a gap shorter than itself
};

/// When something will be there; not known before it is planned elsewhere.
struct Arrival {
  double time = kNever;  ///< at the earliest, when not known
  bool is_known = true;
};

/// One stage's plan so far.
struct Stage {
  double now = 0, bubble = 0;
  int forwards = 0, inputs = 0, weights = 0;
  ActionKind last = ActionKind::kBackwardInput;
  std::vector<double> forward_ends, input_ends;
  Actions list;
};

/// Plans all stages together, always the one that is free first.
class Planner {
 public:
  Planner(int p, int m, const ZeroBubbleSearch& search, const Variant& variant)
      : m_(m),
        search_(search),
        costs_(search.costs),
        variant_(variant),
        stages_(at(p)) {
    moment_ = 1e-9 *
              (costs_.forward + costs_.backward_input + costs_.backward_weight);
  }

  std::vector<Stage> run() {
    for (int i = first_free(); i >= 0; i = first_free()) {
      i_ = i;
      const bool is_warm = stage().inputs > 0;
      if (!(is_warm ? plan_steady() : plan_warm_up())) wait();
    }
    return stages_;
  }

 private:
  Stage& stage() { return stages_[at(i_)]; }
  const Stage& stage() const { return stages_[at(i_)]; }
  bool is_done(const Stage& s) const { return s.weights == m_; }

  /// The last of those that are free first.
  int first_free() const {
    int best = -1;
    for (int i = 0; at(i) < stages_.size(); ++i) {
      if (is_done(stages_[at(i)])) continue;
      if (best < 0 || stages_[at(i)].now <= stages_[at(best)].now) best = i;
    }
    return best;
  }

  Arrival forward_arrival() const {
    const Stage& s = stage();
    if (s.forwards == m_) return {};
    if (i_ == 0) return {s.now, true};
    return message(stages_[at(i_ - 1)].forward_ends, s.forwards,
                   costs_.forward);
  }
  Arrival input_arrival() const {
    const Stage& s = stage();
    if (s.inputs == s.forwards) return {};
    if (at(i_) + 1 == stages_.size()) return {s.now, true};
    return message(stages_[at(i_ + 1)].input_ends, s.inputs,
                   costs_.backward_input);
  }
  Arrival message(const std::vector<double>& ends, int b, double length) const {
    if (at(b) < ends.size()) {
      return {ends[at(b)] + costs_.communication, true};
    }
    // All others are free later than this one
    return {stage().now + moment_ + length + costs_.communication, false};
  }

  bool has_room() const {
    const Stage& s = stage();
    const double sets =
        s.forwards - s.inputs + search_.weight_share * (s.inputs - s.weights);
    return sets <= search_.memory_limit - 1 + 1e-9;
  }

  bool act(ActionKind kind, double begin) {
    Stage& s = stage();
    if (!s.list.empty()) s.bubble += std::max(0.0, begin - s.now);
    if (kind == ActionKind::kForward) {
      s.now = begin + costs_.forward;
      s.forward_ends.push_back(s.now);
      s.list.push_back(forward(s.forwards++));
    } else if (kind == ActionKind::kBackwardInput) {
      s.now = begin + costs_.backward_input;
      s.input_ends.push_back(s.now);
      s.list.push_back(backward_input(s.inputs++));
    } else {
      s.now = begin + costs_.backward_weight;
      s.list.push_back(backward_weight(s.weights++));
      return true;
    }
    s.last = kind;
    return true;
  }

  /// As many forwards as fit before the first gradient.
  bool plan_warm_up() {
    const double now = stage().now;
    const Arrival f = forward_arrival(), b = input_arrival();
    const bool may_forward =
        stage().forwards < m_ && has_room() && f.is_known && f.time < kNever;
    if (b.is_known && b.time < kNever) {
      const double begin = std::max(now, f.time);
      const bool fits = begin + costs_.forward <= b.time ||
                        (variant_.forwards_late && begin < b.time);
      if (may_forward && fits) return act(ActionKind::kForward, begin);
      return act(ActionKind::kBackwardInput, std::max(now, b.time));
    }
    if (!may_forward) return false;
    return act(ActionKind::kForward, std::max(now, f.time));
  }

  bool plan_steady() {
    const Stage& s = stage();
    const Arrival f = forward_arrival(), b = input_arrival();
    const bool can_weigh = s.weights < s.inputs;
    const bool may_forward = s.forwards < m_ && has_room();
    const bool wants_forward =
        variant_.alternates && s.last == ActionKind::kBackwardInput;
    const bool is_forward_ready = may_forward && f.is_known && f.time <= s.now;
    const bool is_input_ready = b.is_known && b.time <= s.now;
    // Make room
    if (wants_forward && s.forwards < m_ && !has_room() && can_weigh &&
        f.is_known) {
      return act(ActionKind::kBackwardWeight, s.now);
    }
    if (is_forward_ready && (wants_forward || !is_input_ready)) {
      return act(ActionKind::kForward, s.now);
    }
    if (is_input_ready) return act(ActionKind::kBackwardInput, s.now);
    // Fill the gap
    const double next = std::min(may_forward ? f.time : kNever, b.time);
    if (can_weigh && fills(next)) {
      return act(ActionKind::kBackwardWeight, s.now);
    }
    // Take what is known to come, when nothing can come before it
    const double known_f = may_forward && f.is_known ? f.time : kNever;
    const double known_b = b.is_known ? b.time : kNever;
    const double soonest = std::min(known_f, known_b);
    if (soonest == kNever || soonest > earliest_news()) return false;
    return act(
        known_f <= known_b ? ActionKind::kForward : ActionKind::kBackwardInput,
        soonest);
  }

  bool fills(double next) const {
    const double gap = next - stage().now;
    if (gap >= costs_.backward_weight - moment_) return true;
    if (!variant_.fills_small) return false;
    // Too long by a little; worth it where the bubble is the largest of all
    double largest = 0;
    for (const Stage& s : stages_) largest = std::max(largest, s.bubble);
    return stage().bubble + gap >= largest;
  }

  double earliest_news() const {
    double free = kNever;
    for (const Stage& s : stages_) {
      if (&s != &stage() && !is_done(s)) free = std::min(free, s.now);
    }
    return free + costs_.forward + costs_.communication;
  }

  /// Until another stage has planned more.
  void wait() {
    Stage& self = stage();
    double later = kNever;
    for (const Stage& s : stages_) {
      if (s.now > self.now + moment_) later = std::min(later, s.now);
    }
    if (later == kNever) later = self.now + 1e6 * moment_;
    if (!self.list.empty()) self.bubble += later - self.now;
    self.now = later;
  }

  int m_;
  const ZeroBubbleSearch& search_;
  const Costs& costs_;
  Variant variant_;
  std::vector<Stage> stages_;
  double moment_ = 0;
  int i_ = 0;
};

void check_search(const ZeroBubbleSearch& search) {
  SB_CHECK(search.memory_limit >= 1, "--schedule zb-auto: a memory limit of ",
           search.memory_limit, " sets of activations; give at least 1");
  SB_CHECK(search.weight_share >= 0 && search.weight_share <= 1,
           "--schedule zb-auto: a share of ", search.weight_share,
           " waits for the weights; give 0 to 1");
  const Costs& costs = search.costs;
  SB_CHECK(costs.forward > 0 && costs.backward_input > 0 &&
               costs.backward_weight > 0 && costs.communication >= 0,
           "--schedule zb-auto: costs of ", costs.forward, ", ",
           costs.backward_input, " and ", costs.backward_weight,
           "; give positive ones");
}

bool fits(const Schedule& schedule, const Replay& result,
          const ZeroBubbleSearch& search) {
  StageBytes set;
  set.until_input = 1 - search.weight_share;
  set.until_weight = search.weight_share;
  const auto peaks = peak_bytes(
      schedule, result, std::vector<StageBytes>(at(schedule.num_stages), set));
  return *std::max_element(peaks.begin(), peaks.end()) <=
         search.memory_limit + 1e-6;
}

}  // namespace

Schedule zb_auto(int num_ranks, int micro_batches,
                 const ZeroBubbleSearch& search) {
  check_search(search);
  // Those that are known by hand, and those that are found
  std::vector<Schedule> candidates = {zb_h1(num_ranks, micro_batches),
                                      zb_h2(num_ranks, micro_batches)};
  for (int bits = 0; bits < 8; ++bits) {
    const Variant variant{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
    auto stages = Planner(num_ranks, micro_batches, search, variant).run();
    Schedule planned = empty("", num_ranks, micro_batches);
    for (std::size_t i = 0; i < stages.size(); ++i) {
      planned.actions[i] = std::move(stages[i].list);
    }
    candidates.push_back(planned);
  }
  const Schedule* best = nullptr;
  double smallest = kNever;
  for (const Schedule& each : candidates) {
    const Replay result = replay(each, search.costs);
    const double bubble = window_bubble(result);
    if (bubble < smallest && fits(each, result, search)) {
      smallest = bubble;
      best = &each;
    }
  }
  SB_CHECK(best != nullptr, "--schedule zb-auto: nothing fits ",
           search.memory_limit, " sets of activations");
  Schedule schedule = *best;
  schedule.name = "zb-auto";
  return schedule;
}

}  // namespace shardbook::pipeline::schedules
