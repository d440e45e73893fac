// The memory of a step.

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "chapters/planner/step.h"
#include "chapters/planner/step_parts.h"
#include "core/check.h"

namespace shardbook::planner {

const std::pair<const char*, double StepMemory::*> StepMemory::kKinds[6] = {
    {"parameters", &StepMemory::parameters},
    {"gradients", &StepMemory::gradients},
    {"optimizer", &StepMemory::optimizer},
    {"activations", &StepMemory::activations},
    {"messages", &StepMemory::messages},
    {"host", &StepMemory::host}};

int live_sets(const HybridJob& job, int pp_rank) {
  const int p = job.pp, v = job.chunks;
  const auto m = static_cast<int>(job.micro_batches);
  if (job.is_zero_bubble) return std::min(p, m);
  if (v == 1) return std::min(p - pp_rank, m);
  return std::min(2 * (p - pp_rank - 1) + (v - 1) * p + 1, m * v);
}

// Adam, with f32 copies of 16-bit parameters
zero::ModelStates HybridJob::states(double parameters, double experts) const {
  const zero::StateBytes bytes = zero::state_bytes(layout.dtype, "adamw", {});
  zero::ModelStates all =
      zero::model_states(zero_stage, parameters - experts, replicas(), bytes);
  if (experts == 0) return all;
  const auto copies = static_cast<int>(Ranks(*this).of_experts().size());
  const zero::ModelStates more =
      zero::model_states(zero_stage, experts, copies, bytes);
  all.parameters += more.parameters;
  all.gradients += more.gradients;
  all.optimizer += more.optimizer;
  return all;
}

namespace {

constexpr char kOfStates[] = "03_zero_fsdp/README.md#the-problem";
constexpr char kOfShards[] = "03_zero_fsdp/details.md#memory";
constexpr char kOfSet[] = "00_single_device/details.md#the-bill-line-by-line";

/// Adds up the memory of one rank.
class RankMemory {
 public:
  explicit RankMemory(const HybridJob& job) : job_(job) {}

  void add(double StepMemory::*kind, const MemoryTerm& term) {
    if (term.bytes() == 0) return;
    sum.*kind += term.bytes();
    terms.push_back(term);
    terms.back().kind = kind;
  }
  /// The ZeRO chapter's table of `parameters`, of which `experts` are in experts;
  /// a host has what an offload leaves there. Gradients that come and go are not
  /// among it.
  void add_states(const char* what, double parameters, double experts) {
    const zero::ModelStates own = job_.states(parameters, experts);
    const zero::StateBytes each =
        zero::state_bytes(job_.layout.dtype, "adamw", {});
    const auto add_state = [&](double StepMemory::*kind, double bytes,
                               double sum, bool is_on_host) {
      if (sum == 0) return;
      add(is_on_host ? &StepMemory::host : kind,
          {what, kOfStates, parameters, bytes,
           std::round(parameters * bytes / sum)});
    };
    const bool offloads = job_.offloads;
    add_state(&StepMemory::parameters, each.parameter, own.parameters,
              offloads && job_.zero_stage == 3);
    if (job_.zero_stage >= 2 && !job_.runs_zero()) {
      add_state(&StepMemory::gradients, each.gradient, own.gradients, offloads);
    }
    add_state(&StepMemory::optimizer, each.optimizer, own.optimizer, offloads);
  }

  StepMemory sum;
  std::vector<MemoryTerm> terms;

 private:
  const HybridJob& job_;
};

/// What a rank holds beside parameters and the optimizer's state when it is
/// fullest.
struct Moment {
  double sets = 0, set_bytes = 0;  ///< that wait for their backward
  double gradients = 0;            ///< elements
  Held work;                       ///< of the action under way
  int sent = 0;                    ///< messages to other stages
  double buckets = 0;              ///< bytes of the update's
};

/// Goes through a rank's actions.
class FullestMoment {
 public:
  FullestMoment(const HybridJob& job, const std::vector<StageRun>& runs,
                int rank)
      : job_(job), runs_(runs), rank_(static_cast<std::size_t>(rank)) {}

  Moment find(const pipeline::Schedule& schedule) {
    for (const pipeline::Action& each : schedule.actions[rank_]) perform(each);
    update();
    return most_;
  }

 private:
  const StageRun& run_of(std::size_t chunk) const {
    return runs_[rank_ + chunk * static_cast<std::size_t>(job_.pp)];
  }

  void perform(const pipeline::Action& action) {
    const auto chunk = static_cast<std::size_t>(action.chunk);
    const StageRun& run = run_of(chunk);
    const bool is_initial = action.micro_batch == 0;  // it creates gradients
    const double of_input = run.input_gradients / job_.element();
    switch (action.kind) {
      case pipeline::ActionKind::kForward:
        consider(run.forward_peak);
        keep(1, run.kept_bytes);
        if (!is_last(chunk)) send(to_next_);
        break;
      case pipeline::ActionKind::kBackward:
        keep(-1, -run.kept_bytes);
        consider(is_initial ? run.first_backward_peaks : run.backward_peaks);
        if (is_initial) now_.gradients += run.parameters;
        if (!is_first(chunk)) send(to_previous_);
        break;
      case pipeline::ActionKind::kBackwardInput:
        keep(-1, -run.kept_bytes);
        consider(run.backward_input_peak);
        keep(1, run.kept_for_weights_bytes);
        if (is_initial) now_.gradients += of_input;
        if (!is_first(chunk)) send(to_previous_);
        break;
      default:
        keep(-1, -run.kept_for_weights_bytes);
        consider(run.backward_weight_peak);
        if (is_initial) now_.gradients += run.parameters - of_input;
        break;
    }
  }

  bool is_first(std::size_t chunk) const { return rank_ == 0 && chunk == 0; }
  bool is_last(std::size_t chunk) const {
    return &run_of(chunk) == &runs_.back();
  }
  /// The last message to each other rank is still there.
  void send(bool& has_sent) {
    has_sent = true;
    now_.sent = job_.pp == 2 ? 1 : int{to_next_} + int{to_previous_};
  }
  void keep(double sets, double bytes) {
    now_.sets += sets;
    now_.set_bytes += bytes;
  }

  /// Buckets leave one after the other; with ZeRO-1 a gradient goes as its shard
  /// comes.
  void update() {
    now_.sets = now_.set_bytes = now_.sent = 0;
    const Ranks groups(job_);
    const auto sharing = static_cast<double>(groups.of_experts().size());
    for (const SentBucket& each :
         buckets_of(job_, runs_, static_cast<int>(rank_))) {
      const double ranks = each.is_expert ? sharing : job_.replicas();
      const bool is_sharded = job_.zero_stage == 1;
      if (!is_sharded && ranks == 1 && !each.is_tied) continue;
      now_.buckets = each.elements * job_.gradient();
      consider(Held());
      if (is_sharded) now_.gradients -= each.elements * (1 - 1 / ranks);
    }
  }

  double total(const Moment& each) const {
    return each.set_bytes + each.gradients * job_.element() +
           each.work.total() + each.sent * sent_activation(job_) + each.buckets;
  }
  void consider(const BackwardPeaks& peaks) {
    for (const Held& each : {peaks.head, peaks.blocks, peaks.embedding}) {
      consider(each);
    }
  }
  void consider(const Held& work) {
    now_.work = work;
    if (total(now_) > total(most_)) most_ = now_;
  }

  const HybridJob& job_;
  const std::vector<StageRun>& runs_;
  std::size_t rank_;
  bool to_next_ = false, to_previous_ = false;
  Moment now_, most_;
};

/// A few micro-batches: then the same memory comes again.
const pipeline::Schedule& short_schedule(const HybridJob& job) {
  const int most = job.chunks > 1 ? 3 * job.pp : 2 * job.pp;
  const int m = static_cast<int>(
      std::min(job.micro_batches, static_cast<std::int64_t>(most)));
  return once_for(std::tuple(job.is_zero_bubble, job.pp, job.chunks, m),
                  [&] { return schedule_of(job, m); });
}

/// Stages 0 and 1.
RankMemory memory_of_rank(const HybridJob& job,
                          const std::vector<StageRun>& runs,
                          const StageRun& whole, int rank) {
  RankMemory memory(job);
  memory.add_states("parameters", whole.parameters - whole.expert_parameters,
                    0);
  memory.add_states("parameters of experts", whole.expert_parameters,
                    whole.expert_parameters);
  const Moment most = FullestMoment(job, runs, rank).find(short_schedule(job));
  memory.add(&StepMemory::gradients,
             {"gradients", kOfStates, most.gradients, job.element()});
  memory.add(
      &StepMemory::gradients,
      {"new ones before they are added",
       "00_single_device/details.md#micro-batches", 1, most.work.gradients});
  if (most.sets > 0) {
    memory.add(
        &StepMemory::activations,
        {"sets that wait for their backward", "06_1f1b/README.md#the-idea",
         most.sets, most.set_bytes / most.sets});
  }
  memory.add(&StepMemory::activations,
             {"the peak of the set in work", kOfSet, 1, most.work.activations});
  memory.add(&StepMemory::messages,
             {"inside the layers", page_of_layers(job), 1, most.work.messages});
  memory.add(&StepMemory::messages,
             {"activations sent to other stages", "06_1f1b/README.md#the-idea",
              static_cast<double>(most.sent), sent_activation(job)});
  memory.add(&StepMemory::messages,
             {"the bucket under way", "03_zero_fsdp/details.md#reduce", 1,
              most.buckets});
  return memory;
}

/// Stages 2 and 3: the fullest moment of the chapter's own run.
RankMemory memory_of_run(const HybridJob& job, double parameters) {
  RankMemory memory(job);
  memory.add_states("parameters", parameters, 0);
  const BytesByKind peak = zero_run(job).peak;
  const auto at_peak = [&](MemoryKind kind) {
    return peak[static_cast<std::size_t>(kind)];
  };
  const double element = job.element();
  const auto add = [&](double StepMemory::*kind, const char* what,
                       double bytes) {
    memory.add(kind, {what, kOfShards, bytes / element, element});
  };
  const double gathered =
      at_peak(MemoryKind::kParameter) - memory.sum.parameters;
  add(&StepMemory::parameters, "elements gathered", std::max(0.0, gathered));
  add(&StepMemory::gradients, "elements", at_peak(MemoryKind::kGradient));
  memory.add(&StepMemory::activations, {"the peak of the set in work", kOfSet,
                                        1, at_peak(MemoryKind::kActivation)});
  add(&StepMemory::messages, "elements under way",
      at_peak(MemoryKind::kCommunication));
  return memory;
}

/// Stages 2 and 3 with offload, which have no pipeline.
RankMemory memory_of_zero(const HybridJob& job, const StageRun& run,
                          double parameters) {
  const double block = block_elements(job, run);
  const double element = job.element(), table = job.table();
  const int stage = job.zero_stage;
  RankMemory memory(job);
  memory.add_states("parameters", parameters, 0);
  Held peak = run.forward_peak;
  for (const Held& each :
       {run.backward_peaks.head, run.backward_peaks.blocks}) {
    if (each.total() > peak.total()) peak = each;
  }
  memory.add(&StepMemory::activations,
             {"the peak of the set in work", kOfSet, 1, peak.activations});
  memory.add(&StepMemory::messages,
             {"inside the layers", page_of_layers(job), 1, peak.messages});
  if (stage <= 2) {
    memory.add(&StepMemory::messages,
               {"buckets", "03_zero_fsdp/details.md#reduce",
                static_cast<double>(stage), job.bucket_bytes});
  }
  // Temporary gradients: the largest of a block's matrices, and the head's
  // gradient of the table. That waits for the embedding's, if they share the
  // table; else stage 2 sends it at once
  const bool waits = job.is_tied || stage == 3;
  memory.add(
      &StepMemory::gradients,
      {waits ? "elements of the table and of a block's largest matrix"
             : "elements of a block's largest matrix",
       kOfShards, (waits ? table : 0) + largest_matrix(job, block), element});
  if (stage == 2) return memory;
  // Gathered: the table and a block; the next block counts as a message. Behind a
  // head with a table of its own, the last block's parameters come while the
  // head's are still there, and those before them for its second forward
  memory.add(&StepMemory::parameters,
             {"elements of the table and of a block, gathered", kOfShards,
              table + block, element});
  const bool has_more =
      !job.is_tied && job.layout.recompute == Recompute::kBlocks;
  memory.add(&StepMemory::messages,
             {"elements of blocks that are gathered ahead", kOfShards,
              (has_more ? 4 : 2) * block, element});
  return memory;
}

}  // namespace

StepMemory step_memory(const HybridJob& job, std::vector<MemoryTerm>* terms) {
  SB_CHECK(job.layout.recompute < Recompute::kEverySecondProduct,
           "the memory of blocks that compute every second product, or of "
           "which every second computes, again is not predicted");
  const std::vector<StageRun> runs = runs_of(job), ranks = ranks_of(job, runs);
  StepMemory most;
  for (int rank = 0; rank < job.pp; ++rank) {
    const StageRun& own = ranks[static_cast<std::size_t>(rank)];
    // Of ranks with the same stages the first keeps most sets; with zero bubble the
    // last keeps most for weights
    const auto is_like = [&](int other) {
      return other < job.pp && has_stages_of(job, runs, rank, other);
    };
    if (rank > 1 && is_like(rank - 1) &&
        (!job.is_zero_bubble || is_like(rank + 1))) {
      continue;
    }
    const RankMemory memory =
        job.runs_zero()       ? memory_of_run(job, own.parameters)
        : job.zero_stage >= 2 ? memory_of_zero(job, runs[0], own.parameters)
                              : memory_of_rank(job, runs, own, rank);
    if (memory.sum.total() <= most.total()) continue;
    most = memory.sum;
    if (terms != nullptr) *terms = memory.terms;
  }
  return most;
}

}  // namespace shardbook::planner
