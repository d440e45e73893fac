// The plans among which the planner chooses.

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "chapters/planner/search.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

std::vector<int> divisors(std::int64_t n) {
  std::vector<int> result;
  for (std::int64_t i = 1; i <= n; ++i) {
    if (n % i == 0) result.push_back(static_cast<int>(i));
  }
  return result;
}

/// The option that a refusal names first: "--tp".
std::string option_of(const std::string& refusal) {
  return refusal.substr(0, refusal.find(' '));
}

class Space {
 public:
  Space(const PlanRequest& request, std::map<std::string, Rejection>* illegal)
      : request_(request),
        options_(options_of(request)),
        layers_(request.base.layers),
        illegal_(illegal) {}

  std::vector<Plan> all() {
    const Limits& only = request_.limits;
    for (const int tp : divisors(request_.world_size)) {
      if (only.tp > 0 ? tp != only.tp : tp > only.max_tp) continue;
      for (const int pp : divisors(request_.world_size / tp)) {
        if (only.pp > 0 && pp != only.pp) continue;
        for (const int cp : divisors(request_.world_size / tp / pp)) {
          if (only.cp > 0 ? cp != only.cp : !is_worth_cutting(cp)) continue;
          degrees(tp, pp, cp);
        }
      }
    }
    return std::move(plans_);
  }

 private:
  /// Sequences of less than some thousand tokens are not worth cutting: a part
  /// must keep its device busy while the next keys arrive.
  bool is_worth_cutting(int cp) const {
    return cp == 1 || request_.seq() / cp >= 2048;
  }

  void degrees(int tp, int pp, int cp) {
    const Limits& only = request_.limits;
    Plan plan;
    plan.setup.tp = tp;
    plan.setup.pp = pp;
    plan.setup.cp = cp;
    plan.setup.dp = request_.world_size / (tp * pp * cp);
    if (cp > 1) plan.setup.cp_layout = "zigzag";
    const bool has_experts = request_.base.sizes.has_own_experts();
    for (const int ep :
         has_experts ? divisors(plan.setup.dp) : std::vector<int>{1}) {
      if (only.ep > 0 ? ep != only.ep : !shares_experts(ep)) continue;
      plan.setup.ep = ep;
      stages(plan);
    }
  }

  /// More ranks than experts cannot share them.
  bool shares_experts(int ep) const {
    return ep == 1 || request_.base.sizes.model->llama.num_experts % ep == 0;
  }

  void stages(Plan plan) {
    const Limits& only = request_.limits;
    const int tp = plan.setup.tp, pp = plan.setup.pp, cp = plan.setup.cp;
    for (int stage = 0; stage <= 3; ++stage) {
      if (only.zero_stage >= 0 && stage != only.zero_stage) continue;
      // Nothing to share, except with a host
      const bool is_alone = plan.setup.dp * cp == 1;
      if (is_alone && stage > 0 && stage != only.zero_stage &&
          !(only.offloads && tp * pp == 1 && stage >= 2)) {
        continue;
      }
      plan.setup.zero_stage = stage;
      for (const bool sp : {false, true}) {
        if (sp && (tp == 1 || only.sequence_parallel == 0)) continue;
        if (!sp && tp > 1 && only.sequence_parallel == 1) continue;
        plan.setup.sequence_parallel = sp;
        plan.setup.micro_batches = 1;
        if (request_.batch % plan.setup.dp == 0) {
          plan.setup.micro_batches = request_.batch / plan.setup.dp;
        }
        if (is_legal(plan)) micro_batches(plan, is_alone);
      }
    }
  }

  void micro_batches(Plan plan, bool is_alone) {
    const Limits& only = request_.limits;
    const std::int64_t of_replica = request_.batch / plan.setup.dp;
    for (const int size : divisors(of_replica)) {
      if (only.micro_batch > 0 && size != only.micro_batch) continue;
      if (only.micro_batch == 0 && size > only.max_micro_batch) continue;
      plan.micro_batch = size;
      plan.setup.micro_batches = of_replica / size;
      for (const char* recompute : {"never", "attention", "blocks"}) {
        if (!only.recompute.empty() && recompute != only.recompute) continue;
        plan.recompute = recompute;
        schedules(plan, is_alone);
      }
    }
  }

  void schedules(Plan plan, bool is_alone) {
    const Limits& only = request_.limits;
    const bool has_pipeline = plan.setup.pp > 1;
    const auto offer = [&](const std::string& name, int chunks) {
      if (has_pipeline && !only.schedule.empty() && name != only.schedule) {
        return;
      }
      const int chunks_of_rank = name == "interleaved" ? chunks : 1;
      if (has_pipeline && only.chunks > 0 && chunks_of_rank != only.chunks) {
        return;
      }
      plan.setup.schedule = name;
      plan.setup.chunks = chunks;
      if (!has_pipeline || has_legal_schedule(plan)) {
        with_offload(plan, is_alone);
      }
    };
    if (plan.setup.pp > layers_) return;
    offer("1f1b", 2);
    if (!has_pipeline) return;
    if (only.has_zero_bubble && plan.recompute == "never") offer("zb-h1", 2);
    for (int chunks = 2; plan.setup.pp * chunks <= layers_ + 2; ++chunks) {
      if (chunks > only.max_chunks) break;
      const int stages = plan.setup.pp * chunks;
      const bool is_even = layers_ % stages == 0 || (layers_ + 2) % stages == 0;
      if (is_even) offer("interleaved", chunks);
    }
  }

  void with_offload(Plan plan, bool is_alone) {
    const bool is_plain = plan.setup.tp * plan.setup.pp * plan.setup.cp == 1;
    if (!is_alone || plan.setup.zero_stage < 2) plans_.push_back(plan);
    if (!request_.limits.offloads || !is_plain || plan.setup.zero_stage < 2) {
      return;
    }
    if (plan.recompute == "attention") return;  // the ZeRO chapter has blocks
    plan.offloads = true;
    plans_.push_back(plan);
  }

  std::string refusal(const Plan& plan) const {
    return hybrid::refusal(options_, chapter_options(request_, plan));
  }

  bool is_legal(const Plan& plan) { return is_no_refusal(refusal(plan)); }

  /// The rest of the plan is legal; plans that differ in it have the same
  /// schedules.
  bool has_legal_schedule(const Plan& plan) {
    const auto& setup = plan.setup;
    const auto [found, is_new] = refusals_.try_emplace(
        {setup.schedule, setup.pp, setup.chunks, setup.micro_batches});
    if (is_new) found->second = refusal(plan);
    return is_no_refusal(found->second);
  }

  /// Counts a refusal.
  bool is_no_refusal(const std::string& reason) {
    if (reason.empty()) return true;
    if (illegal_ != nullptr) {
      Rejection& rejection = (*illegal_)[option_of(reason)];
      if (rejection.count++ == 0) rejection.example = reason;
    }
    return false;
  }

  const PlanRequest& request_;
  const Options options_;
  const std::int64_t layers_;
  std::map<std::string, Rejection>* illegal_;
  std::map<std::tuple<std::string, int, int, std::int64_t>, std::string>
      refusals_;
  std::vector<Plan> plans_;
};

}  // namespace

std::vector<Plan> plans_of(const PlanRequest& request,
                           std::map<std::string, Rejection>* illegal) {
  return Space(request, illegal).all();
}

}  // namespace shardbook::planner
