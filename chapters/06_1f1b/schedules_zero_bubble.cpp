// Zero bubble within a memory limit, found by a search.

#include <algorithm>
#include <limits>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"

namespace shardbook::pipeline::schedules {

using namespace parts;

namespace {

/// Choices that the paper leaves to a search.
struct Variant {
  bool waits_for_first = false;  ///< one more F, although it delays the first I
  bool prefers_input = false;    ///< no F if it would delay an I
  bool fills_early = false;      ///< W also in every gap shorter than W
};

/// One stage's plan so far.
struct Stage {
  double now = 0, bubble = 0;
  double sets = 0;  ///< of activations that are kept
  std::vector<double> forward_ends, input_ends;
  int weights = 0;
  Actions list;

  int forwards() const { return static_cast<int>(forward_ends.size()); }
  int inputs() const { return static_cast<int>(input_ends.size()); }
  bool can_weigh() const { return weights < inputs(); }
};

/// Plans in rounds. In the first round every stage runs as many F as fit before
/// its first gradient. Each later round has at most one F per stage, from the
/// first stage to the last, then one I per stage, from the last to the first. W
/// fills the gaps before both, and frees memory.
class Planner {
 public:
  Planner(int p, int m, const ZeroBubbleSearch& search, const Variant& variant)
      : p_(p),
        m_(m),
        search_(search),
        costs_(search.costs),
        variant_(variant),
        stages_(at(p)) {}

  std::vector<Stage> run() {
    plan_warm_up();
    for (int b = 1; b < m_; ++b) plan_round();
    for (Stage& s : stages_) {
      while (s.weights < m_) weigh(&s);
    }
    return stages_;
  }

 private:
  // --- Actions of a stage ---

  /// The time at which the inputs of the next forward arrive.
  double forward_arrival(int i) const {
    if (i == 0) return stages_[0].now;
    const Stage& before = stages_[at(i - 1)];
    return before.forward_ends[at(stages_[at(i)].forwards())] +
           costs_.communication;
  }
  double input_arrival(int i) const {
    if (i + 1 == p_) return stages_[at(i)].now;
    const Stage& behind = stages_[at(i + 1)];
    return behind.input_ends[at(stages_[at(i)].inputs())] +
           costs_.communication;
  }
  void start(Stage* s, double arrival, double length) const {
    if (!s->list.empty()) s->bubble += std::max(0.0, arrival - s->now);
    s->now = std::max(s->now, arrival) + length;
  }
  void forward_at(int i) {
    Stage& s = stages_[at(i)];
    start(&s, forward_arrival(i), costs_.forward);
    s.list.push_back(forward(s.forwards()));
    s.forward_ends.push_back(s.now);
    s.sets += 1;
  }
  void input_at(int i) {
    Stage& s = stages_[at(i)];
    start(&s, input_arrival(i), costs_.backward_input);
    s.list.push_back(backward_input(s.inputs()));
    s.input_ends.push_back(s.now);
    s.sets -= 1 - search_.weight_share;
  }
  void weigh(Stage* s) const {
    s->now += costs_.backward_weight;
    s->list.push_back(backward_weight(s->weights++));
    s->sets -= search_.weight_share;
  }

  bool has_room(double sets) const {
    return sets + 1 <= search_.memory_limit + 1e-9;
  }
  /// The amount by which the bubble can grow before it is the largest.
  double slack(const Stage& s) const {
    double largest = 0;
    for (const Stage& each : stages_) largest = std::max(largest, each.bubble);
    return largest - s.bubble;
  }
  /// Runs W until `arrival`.
  void fill(Stage* s, double arrival) const {
    while (s->can_weigh() && s->now + costs_.backward_weight <= arrival) {
      weigh(s);
    }
    if (!s->can_weigh() || s->now >= arrival) return;
    // The gap is shorter than W, so W would delay the next action. Leaving the
    // gap empty does no harm while another stage has a larger bubble
    if (arrival - s->now > slack(*s) || variant_.fills_early) weigh(s);
  }

  // --- Rounds ---

  void plan_warm_up() {
    for (int i = 0; i < p_; ++i) forward_at(i);
    std::vector<int> more(at(p_), 0);
    double gradient = stages_.back().now + costs_.backward_input;
    for (int i = p_ - 2; i >= 0; --i) {
      const Stage& s = stages_[at(i)];
      const double arrival = gradient + costs_.communication;
      double end = s.now, sets = s.sets;
      while (s.forwards() + more[at(i)] < m_ && has_room(sets) &&
             (variant_.waits_for_first ? end < arrival
                                       : end + costs_.forward <= arrival)) {
        end += costs_.forward;
        sets += 1;
        ++more[at(i)];
      }
      gradient = std::max(end, arrival) + costs_.backward_input;
    }
    // A stage runs fewer extra forwards than the one before
    for (int i = 1; i < p_; ++i) {
      int& own = more[at(i)];
      while (own > 0 && own >= more[at(i - 1)] && own + 1 < m_) --own;
    }
    for (int i = 0; i < p_; ++i) {
      for (int k = 0; k < more[at(i)]; ++k) forward_at(i);
    }
    for (int i = p_ - 1; i >= 0; --i) input_at(i);
  }

  void plan_round() {
    std::vector<bool> forwards(at(p_));
    for (int i = 0; i < p_; ++i) forwards[at(i)] = wants_forward(i);
    // No forward if the next stage does not run it in this round
    for (int i = p_ - 2; i >= 0; --i) {
      forwards[at(i)] = forwards[at(i)] && forwards[at(i + 1)];
    }
    for (int i = 0; i < p_; ++i) {
      if (!forwards[at(i)]) continue;
      Stage& s = stages_[at(i)];
      while (!has_room(s.sets) && s.can_weigh()) weigh(&s);
      if (i > 0) fill(&s, forward_arrival(i));
      forward_at(i);
    }
    for (int i = p_ - 1; i >= 0; --i) {
      Stage& s = stages_[at(i)];
      if (i + 1 < p_) fill(&s, input_arrival(i));
      if (i == 0 && s.forwards() == m_) {
        while (s.can_weigh()) weigh(&s);
      }
      input_at(i);
    }
  }

  bool wants_forward(int i) const {
    const Stage& s = stages_[at(i)];
    if (s.forwards() == m_) return false;
    if (!variant_.prefers_input || i + 1 == p_) return true;
    const Stage& behind = stages_[at(i + 1)];
    if (s.forwards() < behind.forwards() + 2) return true;
    // The time of the gradient if the next stage runs a forward first
    const double gradient = behind.now + costs_.forward +
                            costs_.backward_input + costs_.communication;
    if (s.now >= gradient) return false;
    double end = s.now + costs_.forward, sets = s.sets;
    for (int w = s.weights; !has_room(sets) && w < s.inputs(); ++w) {
      end += costs_.backward_weight;
      sets -= search_.weight_share;
    }
    return end <= gradient || gradient - s.now > slack(s);
  }

  int p_, m_;
  const ZeroBubbleSearch& search_;
  const Costs& costs_;
  Variant variant_;
  std::vector<Stage> stages_;
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

bool fits(const Schedule& schedule, const ZeroBubbleSearch& search) {
  const auto sets = max_live_shares(schedule, search.weight_share);
  return *std::max_element(sets.begin(), sets.end()) <=
         search.memory_limit + 1e-6;
}

}  // namespace

Schedule zb_auto(int num_ranks, int micro_batches,
                 const ZeroBubbleSearch& search) {
  check_search(search);
  // The two handcrafted schedules, and the search's
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
  double smallest = std::numeric_limits<double>::infinity();
  for (const Schedule& each : candidates) {
    const Replay result = replay(each, search.costs);
    const double bubble = window_bubble(result);
    if (bubble < smallest && fits(each, search)) {
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
