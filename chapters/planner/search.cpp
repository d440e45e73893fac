#include "chapters/planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/models/models.h"
#include "chapters/planner/on_shapes.h"
#include "comm/device_mesh.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

struct Candidate {
  Plan plan;
  double least_s = 0;
};

bool is_faster(const Prediction& a, const Prediction& b) {
  return a.step.seconds < b.step.seconds;
}

/// Bytes that the host of a node lacks for the devices that are used of it; 0
/// where its memory is not known.
double host_excess(const Question& question, const StepMemory& memory) {
  const sim::Cluster& cluster = question.base.cluster;
  const int devices = std::min(question.world_size, cluster.devices_per_node);
  if (memory.host <= 0 || cluster.host.memory_bytes <= 0) return 0;
  return devices * memory.host - static_cast<double>(cluster.host.memory_bytes);
}

/// Counts a plan that does not fit, and remembers the nearest.
void count_unfit(const Plan& plan, double excess, Answer& answer) {
  Lost& lost = answer.does_not_fit;
  if (lost.count++ == 0 || excess < answer.least_excess) {
    answer.least_excess = excess;
    lost.example = plan.layout_text() + ", " + plan.work_text();
  }
}

Answer search_among(const Question& question, const std::vector<Plan>& plans,
                    const SearchOptions& setup) {
  Answer answer;
  const double capacity = kUsableMemory * question.capacity();
  std::vector<Candidate> candidates;
  for (const Plan& plan : plans) {
    if (setup.keeps && !setup.keeps(plan)) continue;
    answer.num_plans += 1;
    const double excess = least_bytes(question, plan) - capacity;
    if (setup.prunes && excess > 0) {
      count_unfit(plan, excess, answer);
    } else {
      candidates.push_back({plan, least_seconds(question, plan)});
    }
  }
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [](const auto& a, const auto& b) { return a.least_s < b.least_s; });

  const auto top = static_cast<std::size_t>(setup.top);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& each = candidates[i];
    // Stop at a bound: behind it, all are slower than the best so far
    const bool is_full = answer.best.size() >= top;
    if (setup.prunes && is_full &&
        each.least_s >= answer.best.back().step.seconds) {
      answer.slower_bound.count +=
          static_cast<std::int64_t>(candidates.size() - i);
      break;
    }

    // Memory first: it needs no replay
    const HybridJob job = job_of(question, each.plan);
    const StepMemory memory = step_memory(job);
    double excess = memory.total() - capacity;
    if (excess <= 0) excess = host_excess(question, memory);
    if (excess > 0) {
      count_unfit(each.plan, excess, answer);
      continue;
    }
    answer.num_predicted += 1;
    Prediction prediction = {each.plan, hybrid_step(job), memory};
    const auto place = std::upper_bound(answer.best.begin(), answer.best.end(),
                                        prediction, is_faster);
    answer.best.insert(place, std::move(prediction));
    if (answer.best.size() > top) answer.best.pop_back();
  }
  answer.slower.count =
      answer.num_predicted - static_cast<std::int64_t>(answer.best.size());
  return answer;
}

/// Degrees and sizes that no plan can have.
void check_limits(const Question& question) {
  const Limits& only = question.limits;
  const auto degree = [](int given) {
    return static_cast<std::int64_t>(std::max(given, 1));
  };
  SB_CHECK(question.world_size %
                   (degree(only.tp) * degree(only.pp) * degree(only.cp)) ==
               0,
           "--tp ", degree(only.tp), ", --pp ", degree(only.pp), ", --cp ",
           degree(only.cp), ": their product does not divide the ",
           question.world_size, " devices; give degrees whose product does");
  SB_CHECK(only.micro_batch == 0 || question.batch % only.micro_batch == 0,
           "--micro-batch ", only.micro_batch, ": does not divide --batch ",
           question.batch, "; give one of its divisors");
}

}  // namespace

void check_question(const Question& question) {
  const Options options = options_of(question);
  const ModelConfig config = model_config(options);
  SB_CHECK(config.type == "gpt2", "--model ", question.model,
           ": the planner knows GPTs; give gpt-1.3b, gpt-13b or another one of "
           "that family");
  const int devices = question.base.cluster.num_devices();
  SB_CHECK(question.world_size >= 1 && question.world_size <= devices,
           "--world-size ", question.world_size, ": ",
           question.base.cluster.name, " has ", devices, " devices; give 1 to ",
           devices);
  // As many micro-batches as the chapters accept
  constexpr std::int64_t kMostSamples = 1 << 20;
  SB_CHECK(question.batch >= 1 && question.batch <= kMostSamples, "--batch ",
           question.batch, ": give the samples of a step, 1 to ", kMostSamples);
  SB_CHECK(question.seq >= 1 && question.seq <= config.n_positions, "--seq ",
           question.seq, ": ", question.model, " has ", config.n_positions,
           " positions; give 1 to ", config.n_positions);
  check_limits(question);
  SB_CHECK(question.base.cluster.device.peak_flops.count(question.dtype) > 0,
           "--dtype ", dtype_name(question.dtype), ": the peak of ",
           question.base.cluster.device.name, " is not known in it");
}

Answer search(const Question& question, const SearchOptions& setup) {
  check_question(question);
  std::map<std::string, Lost> illegal;
  const std::vector<Plan> plans = plans_of(question, &illegal);
  Answer answer = search_among(question, plans, setup);
  answer.illegal = std::move(illegal);
  return answer;
}

std::vector<Strategy> search_by_strategy(const Question& question,
                                         SearchOptions setup) {
  check_question(question);
  const std::vector<Plan> plans = plans_of(question);
  setup.top = 1;
  std::vector<Strategy> found;
  const auto add = [&](const std::string& name, auto keeps) {
    setup.keeps = keeps;
    Answer answer = search_among(question, plans, setup);
    if (answer.num_plans > 0) found.push_back({name, std::move(answer)});
  };
  const auto is_data_parallel = [](const Plan& plan) {
    return plan.setup.tp * plan.setup.pp * plan.setup.cp == 1;
  };
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string name = stage > 0 ? fmt::format("ZeRO-{}", stage)
                             : question.world_size == 1 ? "one device"
                                                        : "DDP";
    add(name, [=](const Plan& plan) {
      return is_data_parallel(plan) && !plan.offloads &&
             plan.setup.zero_stage == stage;
    });
  }
  add("offload", [](const Plan& plan) { return plan.offloads; });
  const auto with = [&](const std::string& name, bool tp, bool pp) {
    add(name, [=](const Plan& plan) {
      return (plan.setup.tp > 1) == tp && (plan.setup.pp > 1) == pp &&
             plan.setup.cp == 1;
    });
  };
  with("TP", true, false);
  with("PP", false, true);
  with("TP x PP", true, true);
  add("CP", [](const Plan& plan) { return plan.setup.cp > 1; });
  return found;
}

bool can_confirm(const Question& question, const Plan& plan) {
  if (plan.offloads) return false;
  // ZeRO-2 and -3, and rings, run every rank
  constexpr int kMostFibers = 64;
  const int different = plan.setup.zero_stage >= 2
                            ? question.world_size / plan.setup.tp
                            : plan.setup.pp * plan.setup.cp;
  return different <= kMostFibers;
}

void confirm(const Question& question, Prediction& prediction) {
  const Options options = options_of(question);
  hybrid::HybridOptions setup = chapter_options(question, prediction.plan);
  hybrid::check_legal(options, setup);
  const Report report = train_on_shapes(
      options, hybrid::fold_class(setup),
      [&](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, hybrid::topology_of(setup));
        run.train(options, *hybrid::make_trainer(options, setup, mesh));
      });
  prediction.confirmed_s = report.time.step_s;
  for (const RankReport& rank : report.ranks) {
    prediction.confirmed_bytes =
        std::max(prediction.confirmed_bytes, rank.peak_total.counted);
  }
}

}  // namespace shardbook::planner
