#include "chapters/planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

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

bool is_faster(const Prediction& a, const Prediction& b) {
  return a.step.seconds < b.step.seconds;
}

/// Bytes by which the devices in use on a node exceed its host's memory; 0
/// where that memory is unknown.
double host_excess(const PlanRequest& request, const StepMemory& memory) {
  const sim::Cluster& cluster = request.base.cluster;
  const int devices = std::min(request.world_size, cluster.devices_per_node);
  if (memory.host <= 0 || cluster.host.memory_bytes <= 0) return 0;
  return devices * memory.host - static_cast<double>(cluster.host.memory_bytes);
}

/// Counts a plan that does not fit, and keeps the one that exceeds least.
void count_unfit(const Plan& plan, double excess, PlanResult& result) {
  Rejection& rejection = result.does_not_fit;
  if (rejection.count++ == 0 || excess < result.least_excess) {
    result.least_excess = excess;
    rejection.example = plan.layout_text() + ", " + plan.work_text();
  }
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
  void reject(const Candidate& each, double bytes, double excess) {
    count_unfit(each.plan, excess, result_);
    settle(each, each.least_s, bytes, Point::kDoesNotFit);
  }

  void pass_over(const Candidate& each) {
    result_.slower_bound.count += 1;
    settle(each, each.least_s, each.least_bytes, Point::kBound);
  }

  /// Of the stages, run on shapes.
  static void come_closer(Candidate& each, const HybridJob& job) {
    const bool is_first = each.bound == Candidate::kOperations;
    each.least_s = std::max(each.least_s, least_stage_seconds(job, is_first));
    each.bound = is_first ? Candidate::kBlocks : Candidate::kLayers;
  }

  /// Whether the plan is settled, and has not only got a closer bound.
  bool consider(Candidate& each) {
    const double limit = limit_s();
    const HybridJob job = job_of(request_, each.plan);
    // Stop at a bound: behind the first that is as slow, all are
    if (each.least_s >= limit) {
      pass_over(each);
    } else if (setup_.prunes && each.bound != Candidate::kLayers) {
      come_closer(each, job);
      return false;
    } else {
      predict(each, job, limit);
    }
    return true;
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
    const auto place =
        std::upper_bound(best.begin(), best.end(), prediction, is_faster);
    best.insert(place, std::move(prediction));
    if (best.size() > static_cast<std::size_t>(setup_.top)) best.pop_back();
  }

  const PlanRequest& request_;
  const SearchOptions& setup_;
  const double capacity_;
  std::int64_t num_settled_ = 0;
  PlanResult result_;
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
  SB_CHECK(request.base.cluster.device.peak_flops.count(request.dtype()) > 0,
           "--dtype ", dtype_name(request.dtype()), ": the peak of ",
           request.base.cluster.device.name, " is not known in it");
}

PlanResult search(const PlanRequest& request, const SearchOptions& setup) {
  check_request(request);
  std::map<std::string, Rejection> illegal;
  const std::vector<Plan> plans = plans_of(request, &illegal);
  PlanResult result = Search(request, setup).among(plans);
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
  const auto is_data_parallel = [](const Plan& plan) {
    return plan.setup.tp * plan.setup.pp * plan.setup.cp == 1;
  };
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string name = stage > 0 ? fmt::format("ZeRO-{}", stage)
                             : request.world_size == 1 ? "one device"
                                                       : "DDP";
    add(name, [=](const Plan& plan) {
      return is_data_parallel(plan) && !plan.offloads && plan.setup.ep == 1 &&
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
