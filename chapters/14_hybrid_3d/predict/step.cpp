#include "chapters/14_hybrid_3d/predict/step.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"
#include "sim/cost_model.h"

namespace shardbook::predict {
namespace {

// What makes two stages equal.
std::string key_of(const HybridJob& job, const StageParts& parts) {
  const DecoderSizes& of = job.sizes;
  const StageLayout& how = job.layout;
  std::ostringstream key;
  key << job.cluster.name << ' ' << job.cluster.device.sustained << ' '
      << of.hidden << ' ' << of.heads << ' ' << of.seq << ' ' << of.vocabulary
      << ' ' << of.kv_heads << ' ' << of.head_dim << ' ' << of.window << ' '
      << of.experts << ' ' << of.experts_per_token << ' ' << how.ep << ' '
      << how.sends_once_per_node << ' ' << of.mlp << ' ' << of.is_llama << ' '
      << of.is_gated << ' ' << how.tp << ' ' << how.cp << ' ' << how.cuts_tokens
      << ' ' << static_cast<int>(how.recompute) << ' ' << how.micro_batch << ' '
      << how.converts_to_fp8 << ' ' << dtype_name(how.dtype) << ' '
      << how.dropout << ' ' << parts.blocks << ' ' << parts.has_embedding << ' '
      << parts.has_head;
  return key.str();
}

const StageRun& stage_of(HybridJob job, const StageParts& parts) {
  static std::map<std::string, StageRun> known;
  if (job.overlaps_tensor && job.layout.tp > 1) {
    job.cluster.name += " with overlap";
    job.cluster.intra_node.bytes_per_s *= job.layout.tp;
    job.cluster.intra_node.reduction_bytes_per_s *= job.layout.tp;
  }
  const std::string key = key_of(job, parts);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = run_stage(job.cluster, job.sizes, job.layout, parts);
}

/// Ranks in Megatron-LM's order: tensor, context, data, pipeline.
class Ranks {
 public:
  explicit Ranks(const HybridJob& job)
      : tp_(job.layout.tp), replicas_(job.layout.cp * job.dp) {}
  std::vector<int> of_tp() const {
    std::vector<int> ranks;
    for (int i = 0; i < tp_; ++i) ranks.push_back(i);
    return ranks;
  }
  /// The ranks with the same parameters.
  std::vector<int> of_replicas() const {
    std::vector<int> ranks;
    for (int i = 0; i < replicas_; ++i) ranks.push_back(i * tp_);
    return ranks;
  }
  /// Of these, the ranks with the same experts.
  std::vector<int> of_experts(int ep) const {
    std::vector<int> ranks;
    const int stride = std::max(ep, tp_);
    for (int i = 0; i < std::max(1, tp_ * replicas_ / stride); ++i) {
      ranks.push_back(i * stride);
    }
    return ranks;
  }
  /// The rank of a stage in the first pipeline.
  int at_stage(int stage) const { return stage * tp_ * replicas_; }
  int world(int pp) const { return tp_ * replicas_ * pp; }

 private:
  int tp_, replicas_;
};

double activation_bytes(const HybridJob& job) {
  return static_cast<double>(job.layout.micro_batch * job.sizes.seq *
                             job.sizes.hidden) /
         job.layout.cp * static_cast<double>(dtype_bytes(job.layout.dtype));
}

/// From one stage to the next. Every rank of tp sends its part; where all need
/// the whole, they gather it afterwards (Narayanan et al. 2021, section 4.1).
double message_seconds(const HybridJob& job, const sim::CostModel& costs) {
  if (job.pp == 1) return 0;
  const Ranks ranks(job);
  const double bytes = activation_bytes(job);
  double seconds =
      costs.message(bytes / job.layout.tp, ranks.at_stage(0), ranks.at_stage(1))
          .seconds;
  if (!job.layout.cuts_tokens && job.layout.tp > 1) {
    seconds +=
        costs.collective(CommOp::kAllGather, bytes, ranks.of_tp()).seconds;
  }
  return seconds;
}

/// Equal stages. Where two layers more would divide, the embedding and the head
/// count as one each: the first stage and the last have a layer less (Llama 3;
/// Megatron-LM's account_for_embedding_in_pipeline_split).
std::vector<StageParts> cut(const HybridJob& job) {
  const std::int64_t stages = job.pp * job.chunks;
  const bool is_even = job.layers % stages == 0;
  SB_CHECK(is_even || (job.layers + 2) % stages == 0, job.layers,
           " layers, also with embedding and head counted as layers, do not "
           "divide by ",
           stages, " stages");
  std::vector<StageParts> parts(static_cast<std::size_t>(stages));
  for (StageParts& each : parts) {
    each.blocks = (job.layers + (is_even ? 0 : 2)) / stages;
  }
  if (!is_even) {
    --parts.front().blocks;
    --parts.back().blocks;
  }
  parts.front().has_embedding = true;
  parts.back().has_head = true;
  return parts;
}

double pipeline_seconds(const HybridJob& job, const sim::CostModel& costs,
                        const std::vector<const StageRun*>& runs) {
  const auto m = static_cast<int>(job.micro_batches);
  if (job.pp == 1) {
    const StageRun& run = *runs[0];
    const double each = run.forward_s + run.backward_s;
    return job.is_synchronous ? m * each : each + (m - 1) * run.both_s;
  }
  std::vector<pipeline::Costs> stages;
  for (const StageRun* run : runs) {
    pipeline::Costs each;
    each.forward = run->forward_s;
    each.backward = run->backward_s;
    each.communication = message_seconds(job, costs);
    stages.push_back(each);
  }
  const pipeline::Schedule schedule =
      job.chunks == 1 ? pipeline::schedules::one_f_one_b(job.pp, m)
                      : pipeline::schedules::interleaved(job.pp, m, job.chunks);
  return pipeline::replay(schedule, stages).makespan;
}

/// Sums of gradients over the ranks that have the same parameters.
double gradient_seconds(const HybridJob& job, const sim::CostModel& costs,
                        double parameters, const std::vector<int>& replicas,
                        const StageRun& busiest) {
  if (parameters <= 0) return 0;
  const double gradients =
      parameters * static_cast<double>(dtype_bytes(job.gradient_dtype));
  const auto exposed = [&](double seconds, double beside) {
    return job.overlaps_gradients ? std::max(0.0, seconds - beside) : seconds;
  };
  if (!job.distributes_optimizer) {
    return exposed(
        costs.collective(CommOp::kAllReduce, gradients, replicas).seconds,
        busiest.backward_s);
  }
  const double weights =
      parameters * static_cast<double>(dtype_bytes(job.layout.dtype));
  return exposed(costs.collective(CommOp::kReduceScatter, gradients, replicas)
                     .seconds,
                 busiest.backward_s) +
         exposed(
             costs.collective(CommOp::kAllGather, weights, replicas).seconds,
             busiest.forward_s);
}

/// The part of an update of all parameters that a rank does.
double own_share(const HybridJob& job, const StageRun& run) {
  if (!job.distributes_optimizer) return 1;
  const double experts = run.expert_parameters / run.parameters;
  const Ranks ranks(job);
  return (1 - experts) / static_cast<double>(ranks.of_replicas().size()) +
         experts / static_cast<double>(ranks.of_experts(job.layout.ep).size());
}

double tied_seconds(const HybridJob& job, const sim::CostModel& costs) {
  if (!job.is_tied || job.pp == 1) return 0;
  const double bytes =
      static_cast<double>(job.sizes.vocabulary * job.sizes.hidden) /
      job.layout.tp * static_cast<double>(dtype_bytes(job.gradient_dtype));
  const Ranks ranks(job);
  return costs
      .collective(CommOp::kAllReduce, bytes, {0, ranks.at_stage(job.pp - 1)})
      .seconds;
}

}  // namespace

HybridStep hybrid_step(const HybridJob& job) {
  const Ranks ranks(job);
  SB_CHECK(ranks.world(job.pp) <= job.cluster.num_devices(), job.cluster.name,
           " has ", job.cluster.num_devices(), " devices for ",
           ranks.world(job.pp), " ranks");
  const sim::CostModel costs(job.cluster);
  std::vector<const StageRun*> runs;
  HybridStep step;
  for (const StageParts& parts : cut(job)) {
    runs.push_back(&stage_of(job, parts));
    step.trust = std::max(step.trust, runs.back()->trust);
  }

  // All chunks of a rank reduce and update at the end of the step
  double most_parameters = 0, experts = 0, longest_update = 0;
  StageRun busiest;
  for (int rank = 0; rank < job.pp; ++rank) {
    double parameters = 0, own_experts = 0, update = 0;
    double forward = 0, backward = 0;
    for (int chunk = 0; chunk < job.chunks; ++chunk) {
      const StageRun& run =
          *runs[static_cast<std::size_t>(chunk * job.pp + rank)];
      parameters += run.parameters;
      own_experts += run.expert_parameters;
      update += run.optimizer_s * own_share(job, run);
      forward += run.forward_s;
      backward += run.backward_s;
    }
    if (job.pp == 1 && job.is_tied) {
      // Embedding and head are one table
      parameters -=
          static_cast<double>(job.sizes.vocabulary * job.sizes.hidden) /
          job.layout.tp;
    }
    if (parameters > most_parameters) {
      most_parameters = parameters;
      experts = own_experts;
      busiest.forward_s = forward;
      busiest.backward_s = backward;
    }
    longest_update = std::max(longest_update, update);
  }
  step.pipeline_s = pipeline_seconds(job, costs, runs);
  step.gradients_s =
      gradient_seconds(job, costs, most_parameters - experts,
                       ranks.of_replicas(), busiest) +
      gradient_seconds(job, costs, experts, ranks.of_experts(job.layout.ep),
                       busiest) +
      tied_seconds(job, costs);
  step.optimizer_s = longest_update;
  step.seconds = step.pipeline_s + step.gradients_s + step.optimizer_s;
  return step;
}

}  // namespace shardbook::predict
