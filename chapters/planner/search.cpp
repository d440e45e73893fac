#include "chapters/planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::planner {
namespace {

struct Candidate {
  Plan plan;
  double least_s = 0, least_bytes = 0;
  std::size_t index = 0;  ///< among the legal plans
  /// What least_s counts.
  enum Bound { kOperations, kBlocks, kLayers } bound = kOperations;
};

bool is_later(const Candidate& a, const Candidate& b) {
  return std::tie(a.least_s, a.index) > std::tie(b.least_s, b.index);
}

/// Bytes by which the devices in use on a node exceed its host's memory; 0
/// where that memory is unknown.
double host_excess(const PlanRequest& request, const StepMemory& memory) {
  const sim::Cluster& cluster = request.base.cluster;
  const int devices = std::min(request.world_size, cluster.devices_per_node);
  if (memory.host <= 0 || cluster.host.memory_bytes <= 0) return 0;
  return devices * memory.host - static_cast<double>(cluster.host.memory_bytes);
}

/// Goes through plans from the lowest bound to the highest. A plan whose turn has
/// come first gets closer bounds, which take longer to find, and waits again.
class Search {
 public:
  Search(const PlanRequest& request, const SearchOptions& setup)
      : request_(request),
        setup_(setup),
        capacity_(kUsableMemory * request.capacity()) {}

  PlanResult among(const std::vector<Plan>& plans) {
    result_.num_plans = static_cast<std::int64_t>(plans.size());
    std::vector<Candidate> candidates;  // a heap
    for (const Plan& plan : plans) {
      Candidate each = {plan, 0, least_bytes(request_, plan),
                        candidates.size()};
      const bool fits = !setup_.prunes || each.least_bytes <= capacity_;
      if (fits || setup_.keeps_points) {
        each.least_s = least_seconds(request_, plan);
      }
      if (fits) {
        candidates.push_back(each);
      } else {
        reject(each, each.least_bytes, each.least_bytes - capacity_);
      }
    }
    std::make_heap(candidates.begin(), candidates.end(), is_later);
    while (!candidates.empty()) {
      std::pop_heap(candidates.begin(), candidates.end(), is_later);
      Candidate& next = candidates.back();
      if (consider(next)) {
        candidates.pop_back();
      } else {
        std::push_heap(candidates.begin(), candidates.end(), is_later);
      }
      if (setup_.progress) setup_.progress(num_settled_, result_.num_plans);
    }
    result_.slower.count =
        result_.num_predicted - static_cast<std::int64_t>(result_.best.size());
    return std::move(result_);
  }

 private:
  /// What a plan has to be faster than.
  double limit_s() const {
    const bool is_full =
        result_.best.size() >= static_cast<std::size_t>(setup_.top);
    return setup_.prunes && is_full ? result_.best.back().step.seconds
                                    : kNoLimit;
  }

  void settle(const Candidate& each, double seconds, double bytes,
              Point::Outcome outcome) {
    num_settled_ += 1;
    if (setup_.keeps_points) {
      result_.points.push_back({each.plan, seconds, bytes, outcome});
    }
  }
  /// Counts a plan that does not fit, and keeps the one that exceeds least.
  void reject(const Candidate& each, double bytes, double excess) {
    Rejection& rejection = result_.does_not_fit;
    if (rejection.count++ == 0 || excess < result_.least_excess) {
      result_.least_excess = excess;
      rejection.example =
          each.plan.layout_text() + ", " + each.plan.work_text();
    }
    settle(each, each.least_s, bytes, Point::kDoesNotFit);
  }

  /// Whether the plan is settled, and has not only got a closer bound.
  bool consider(Candidate& each) {
    const double limit = limit_s();
    const HybridJob job = job_of(request_, each.plan);
    // Stop at a bound: behind the first that is as slow, all are
    if (each.least_s >= limit) {
      result_.slower_bound.count += 1;
      settle(each, each.least_s, each.least_bytes, Point::kBound);
      return true;
    }
    if (!setup_.prunes || each.bound == Candidate::kLayers) {
      predict(each, job, limit);
      return true;
    }
    // A bound of the stages, run on shapes
    const bool is_first = each.bound == Candidate::kOperations;
    each.least_s = std::max(each.least_s, least_stage_seconds(job, is_first));
    each.bound = is_first ? Candidate::kBlocks : Candidate::kLayers;
    return false;
  }

  void predict(const Candidate& each, const HybridJob& job, double limit) {
    // Memory first: it needs no replay
    const StepMemory memory = step_memory(job);
    double excess = memory.total() - capacity_;
    if (excess <= 0) excess = host_excess(request_, memory);
    if (excess > 0) {
      reject(each, memory.total(), excess);
      return;
    }
    result_.num_predicted += 1;
    Prediction prediction = {each.plan, hybrid_step(job, limit), memory};
    const bool is_late = limit < kNoLimit && prediction.step.seconds >= limit;
    settle(each, prediction.step.seconds, memory.total(),
           is_late ? Point::kBound : Point::kPredicted);
    if (is_late) return;
    auto& best = result_.best;
    const auto place = std::upper_bound(
        best.begin(), best.end(), prediction, [](const auto& a, const auto& b) {
          return a.step.seconds < b.step.seconds;
        });
    best.insert(place, std::move(prediction));
    if (best.size() > static_cast<std::size_t>(setup_.top)) best.pop_back();
  }

  const PlanRequest& request_;
  const SearchOptions& setup_;
  const double capacity_;
  std::int64_t num_settled_ = 0;
  PlanResult result_;
};

std::vector<int> divisors(std::int64_t n) {
  std::vector<int> result;
  for (std::int64_t i = 1; i <= n; ++i) {
    if (n % i == 0) result.push_back(static_cast<int>(i));
  }
  return result;
}

/// The plans among which the planner chooses.
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
        if (is_no_refusal(refusal(plan))) micro_batches(plan, is_alone);
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
      // By the option that it names first: "--tp"
      Rejection& rejection = (*illegal_)[reason.substr(0, reason.find(' '))];
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

/// Degrees and sizes that no plan can have.
void check_limits(const PlanRequest& request) {
  const Limits& only = request.limits;
  const auto degree = [](int given) {
    return static_cast<std::int64_t>(std::max(given, 1));
  };
  const bool has_experts = request.base.sizes.has_own_experts();
  SB_CHECK(only.ep <= 1 || has_experts, "--ep ", only.ep, ": ", request.model,
           " has no experts; leave it out");
  SB_CHECK(only.ep <= 1 ||
               request.base.sizes.model->llama.num_experts % only.ep == 0,
           "--ep ", only.ep, ": does not divide the ",
           how_many(request.base.sizes.model->llama.num_experts, "expert"),
           "; give one of its divisors");
  SB_CHECK(request.world_size % (degree(only.tp) * degree(only.pp) *
                                 degree(only.cp) * degree(only.ep)) ==
               0,
           "--tp ", degree(only.tp), ", --pp ", degree(only.pp), ", --cp ",
           degree(only.cp),
           only.ep > 1 ? fmt::format(", --ep {}", only.ep) : "",
           ": their product does not divide the ",
           how_many(request.world_size, "device"),
           "; give degrees whose product does");
  SB_CHECK(only.micro_batch == 0 || request.batch % only.micro_batch == 0,
           "--micro-batch ", only.micro_batch, ": does not divide --batch ",
           request.batch, "; give one of its divisors");
}

}  // namespace

void check_request(const PlanRequest& request) {
  const Options options = options_of(request);
  const ModelConfig config = model_config(options);
  SB_CHECK(config.has_blocks(), "--model ", request.model,
           ": the planner knows GPTs and Llamas; give gpt-13b, llama-3.1-8b or "
           "another one of these families");
  const std::int64_t dense = request.base.sizes.dense_blocks();
  for (std::int64_t i = dense; i < config.n_layer; ++i) {
    SB_CHECK(
        config.llama.has_experts_in(i) == config.llama.has_experts_in(dense),
        "--model ", request.model,
        ": has blocks without experts behind blocks with experts; the "
        "planner knows models whose blocks without come first");
  }
  const int devices = request.base.cluster.num_devices();
  SB_CHECK(request.world_size >= 1 && request.world_size <= devices,
           "--world-size ", request.world_size, ": ", request.base.cluster.name,
           " has ", how_many(devices, "device"), "; give 1 to ", devices);
  // As many micro-batches as the chapters accept
  constexpr std::int64_t kMostSamples = 1 << 20;
  SB_CHECK(request.batch >= 1 && request.batch <= kMostSamples, "--batch ",
           request.batch, ": give the samples of a step, 1 to ", kMostSamples);
  SB_CHECK(request.seq() >= 1 && request.seq() <= config.n_positions, "--seq ",
           request.seq(), ": ", request.model, " has ",
           how_many(config.n_positions, "position"), "; give 1 to ",
           config.n_positions);
  check_sequence(config, request.seq());
  check_limits(request);
  peak_flops(request);
}

std::vector<Plan> plans_of(const PlanRequest& request,
                           std::map<std::string, Rejection>* illegal) {
  return Space(request, illegal).all();
}

PlanResult search(const PlanRequest& request, const SearchOptions& setup) {
  check_request(request);
  std::map<std::string, Rejection> illegal;
  PlanResult result = Search(request, setup).among(plans_of(request, &illegal));
  result.illegal = std::move(illegal);
  return result;
}

std::vector<Strategy> search_by_strategy(const PlanRequest& request,
                                         SearchOptions setup) {
  check_request(request);
  const std::vector<Plan> plans = plans_of(request);
  setup.top = 1;
  std::vector<Strategy> found;
  const auto add = [&](const std::string& name, auto keeps) {
    std::vector<Plan> own;
    std::copy_if(plans.begin(), plans.end(), std::back_inserter(own), keeps);
    if (own.empty()) return;
    found.push_back({name, Search(request, setup).among(own)});
  };
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string name = stage > 0 ? fmt::format("ZeRO-{}", stage)
                             : request.world_size == 1 ? "one device"
                                                       : "DDP";
    add(name, [=](const Plan& plan) {
      return plan.setup.tp * plan.setup.pp * plan.setup.cp == 1 &&
             !plan.offloads && plan.setup.ep == 1 &&
             plan.setup.zero_stage == stage;
    });
  }
  add("offload", [](const Plan& plan) { return plan.offloads; });
  const auto with = [&](const std::string& name, bool tp, bool pp) {
    add(name, [=](const Plan& plan) {
      return (plan.setup.tp > 1) == tp && (plan.setup.pp > 1) == pp &&
             plan.setup.cp == 1 && plan.setup.ep == 1;
    });
  };
  with("TP", true, false);
  with("PP", false, true);
  with("TP x PP", true, true);
  add("CP",
      [](const Plan& plan) { return plan.setup.cp > 1 && plan.setup.ep == 1; });
  add("EP", [](const Plan& plan) { return plan.setup.ep > 1; });
  return found;
}

}  // namespace shardbook::planner
