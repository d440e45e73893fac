#include <algorithm>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/planner/step_parts.h"

namespace shardbook::planner {
namespace {

/// Seconds from one rank of the pipeline to the next. Every rank of tp sends
/// its part; if all need the whole, they gather it afterwards (Narayanan et al.
/// 2021, section 4.1).
double message_seconds(const HybridJob& job, const sim::CostModel& costs,
                       int pp_rank) {
  const Ranks ranks(job);
  double seconds = costs
                       .message(sent_activation(job), ranks.at_stage(pp_rank),
                                ranks.at_stage((pp_rank + 1) % job.pp))
                       .seconds;
  if (!job.layout.cuts_tokens && job.layout.tp > 1 && job.scatters_messages) {
    seconds += costs
                   .collective(CommOp::kAllGather, activation_bytes(job),
                               ranks.of_tp())
                   .seconds;
  }
  return seconds;
}

/// By rank: the mean of its messages to the next and to the previous rank.
std::vector<double> messages_of_ranks(const HybridJob& job,
                                      const sim::CostModel& costs) {
  if (job.pp == 1) return {0};
  std::vector<double> next;
  for (int rank = 0; rank < job.pp; ++rank) {
    // Only with chunks, the last rank sends to the first
    const bool is_last = rank + 1 == job.pp && job.chunks == 1;
    next.push_back(is_last ? next.back() : message_seconds(job, costs, rank));
  }
  std::vector<double> mean = next;
  for (std::size_t rank = 0; rank < mean.size(); ++rank) {
    const bool is_first = rank == 0 && job.chunks == 1;
    const std::size_t before = (rank + mean.size() - 1) % mean.size();
    mean[rank] = (next[rank] + next[is_first ? rank : before]) / 2;
  }
  return mean;
}

/// Of all stages. Where the host waits for the device, or is not known to run ahead,
/// nothing is shorter than on an idle device.
std::vector<ActionTimes> times_of(const HybridJob& job,
                                  const std::vector<StageRun>& runs) {
  std::vector<ActionTimes> stages(runs.begin(), runs.end());
  if (job.is_of_chapter()) return stages;
  for (ActionTimes& times : stages) {
    times.first_backward = times.backward;
    times.first_backward_input = times.backward_input;
    times.first_backward_weight = times.backward_weight;
    for (ActionTime* each : times.all_times()) {
      each->device_s = each->host_s = each->s;
    }
  }
  return stages;
}

/// By rank: the part of its time in which rings of its layers use the network, which
/// messages to other stages then share.
std::vector<double> ring_shares(const HybridJob& job,
                                const std::vector<StageRun>& runs) {
  std::vector<double> shares(static_cast<std::size_t>(job.pp));
  const sim::Cluster& cluster = job.cluster;
  if (!job.is_of_chapter() || job.layout.cp == 1) return shares;
  const double speed =
      cluster.network.speed() *
      std::min(1.0, static_cast<double>(cluster.nics_per_node) /
                        cluster.devices_per_node);
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    double rings = 0, all = 0;
    for (std::size_t i = rank; i < runs.size(); i += shares.size()) {
      const auto sent = runs[i].sent_bytes.find(cluster.network.name);
      if (sent != runs[i].sent_bytes.end()) rings += sent->second / speed;
      all += runs[i].forward.s + runs[i].backward.s;
    }
    shares[rank] = rings / all;
  }
  return shares;
}

/// Micro-batches with which a pipeline has a warm-up, a steady state and a
/// cool-down; as many are left over by p as of all.
int least_micro_batches(const HybridJob& job) {
  return 3 * job.pp + static_cast<int>(job.micro_batches % job.pp);
}

/// The schedule of a job, which may depend on a stage's times.
pipeline::Schedule searched_or(const HybridJob& job,
                               const std::vector<ActionTimes>& stages,
                               int micro_batches) {
  if (job.zero_bubble_sets == 0) return schedule_of(job, micro_batches);
  const ActionTimes& middle = stages[stages.size() / 2];
  return pipeline::schedules::zb_auto(
      job.pp, micro_batches,
      {.memory_limit = static_cast<double>(job.zero_bubble_sets),
       .costs = {.forward = middle.forward.s,
                 .backward_input = middle.backward_input.s,
                 .backward_weight = middle.backward_weight.s}});
}

/// A pipeline of ranks, each a device and the host that issues its actions.
class Replay {
 public:
  Replay(const HybridJob& job, const sim::CostModel& costs,
         const std::vector<StageRun>& runs)
      : job_(job),
        stages_(times_of(job, runs)),
        messages_(messages_of_ranks(job, costs)),
        shares_(ring_shares(job, runs)),
        launch_s_(job.is_of_chapter() ? job.cluster.device.launch_s : 0) {}

  /// `actions`: of each rank, added here.
  PipelineTime run(int micro_batches,
                   std::vector<std::vector<TimedAction>>* actions = nullptr) {
    const pipeline::Schedule schedule =
        searched_or(job_, stages_, micro_batches);
    micro_batches_ = static_cast<std::size_t>(micro_batches);
    ranks_.assign(static_cast<std::size_t>(job_.pp), {});
    forwards_.assign(stages_.size() * micro_batches_, kUnknown);
    backwards_ = forwards_;
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        const auto& list = schedule.actions[rank];
        while (ranks_[rank].next < list.size() &&
               perform(rank, list[ranks_[rank].next])) {
          if (actions != nullptr) {
            actions->at(rank).push_back({list[ranks_[rank].next],
                                         ranks_[rank].begin_s,
                                         ranks_[rank].device_s});
          }
          ++ranks_[rank].next;
          goes_on = true;
        }
      }
    }
    PipelineTime time = {0, {}, {}};
    for (const Rank& each : ranks_) {
      time.seconds = std::max(time.seconds, each.device_s);
    }
    for (const Rank& each : ranks_) {
      time.early.push_back(time.seconds - each.device_s);
      time.ahead.push_back(each.device_s - each.host_s);
    }
    return time;
  }

 private:
  static constexpr double kUnknown = -1;
  struct Rank {
    double host_s = 0, device_s = 0;
    double begin_s = 0;  ///< of its last action
    double sends_until_s = 0;
    std::size_t next = 0;
  };

  /// When a stage has what it reads of a micro-batch; kUnknown: not yet.
  double& arrival(std::vector<double>& all, std::size_t stage, std::size_t b) {
    return all[stage * micro_batches_ + b];
  }

  /// False where its input has not been sent.
  bool perform(std::size_t rank, const pipeline::Action& action) {
    const auto b = static_cast<std::size_t>(action.micro_batch);
    const std::size_t stage =
        rank + static_cast<std::size_t>(action.chunk) * ranks_.size();
    const ActionTimes& times = stages_[stage];
    const bool is_last = stage + 1 == stages_.size();
    switch (action.kind) {
      case pipeline::ActionKind::kForward: {
        const double from = stage == 0 ? 0 : arrival(forwards_, stage, b);
        if (from == kUnknown) return false;
        if (stage > 0) receive(rank, from);
        pass(rank, times.forward);
        if (is_last && job_.is_of_chapter()) {
          ranks_[rank].host_s = ranks_[rank].device_s;  // it reads the loss
        }
        if (!is_last) send(rank, arrival(forwards_, stage + 1, b));
        return true;
      }
      case pipeline::ActionKind::kBackward:
      case pipeline::ActionKind::kBackwardInput: {
        const double from = is_last ? 0 : arrival(backwards_, stage, b);
        if (from == kUnknown) return false;
        const bool is_whole = action.kind == pipeline::ActionKind::kBackward;
        if (!is_last) receive(rank, from);
        pass(rank, is_whole ? b == 0 ? times.first_backward : times.backward
                   : b == 0 ? times.first_backward_input
                            : times.backward_input);
        if (stage > 0) send(rank, arrival(backwards_, stage - 1, b));
        return true;
      }
      default:
        pass(rank,
             b == 0 ? times.first_backward_weight : times.backward_weight);
        return true;
    }
  }

  /// Where layers and a message share the network, each delays the other.
  void send(std::size_t rank, double& arrives_at) {
    Rank& from = ranks_[rank];
    from.host_s += launch_s_;
    arrives_at = std::max(from.device_s, from.host_s);
    from.sends_until_s = arrives_at + messages_[rank];
    (job_.waits_for_messages ? from.device_s : arrives_at) +=
        messages_[rank] * (1 + shares_[rank]);
  }
  /// The device waits for an input that was sent, or arrives, at `from`.
  void receive(std::size_t rank, double from) {
    Rank& to = ranks_[rank];
    to.host_s += launch_s_;
    const double busy_s = std::clamp(to.device_s - (from - messages_[rank]),
                                     0.0, messages_[rank]);
    to.device_s += shares_[rank] * busy_s;
    to.device_s = std::max(to.device_s, from + shares_[rank] * busy_s);
    if (job_.waits_for_messages) to.device_s += messages_[rank];
  }

  void pass(std::size_t index, const ActionTime& each) {
    Rank& rank = ranks_[index];
    rank.begin_s = rank.device_s;
    rank.device_s = std::max(rank.device_s + each.device_s,
                             std::max(rank.host_s, 0.0) + each.s);
    rank.begin_s = std::max(rank.begin_s, rank.device_s - each.s);
    rank.device_s += shares_[index] *
                     std::max(0.0, std::min(rank.sends_until_s, rank.device_s) -
                                       rank.begin_s);
    rank.host_s += each.host_s;
  }

  const HybridJob& job_;
  const std::vector<ActionTimes> stages_;
  const std::vector<double> messages_, shares_;
  const double launch_s_;  ///< of a message, by the host
  std::size_t micro_batches_ = 0;
  std::vector<Rank> ranks_;
  std::vector<double> forwards_, backwards_;
};

/// Device and host of a micro-batch on all stages of each rank.
std::vector<ActionTime> work_of_ranks(const HybridJob& job,
                                      const std::vector<ActionTimes>& stages) {
  std::vector<ActionTime> own(static_cast<std::size_t>(job.pp));
  for (std::size_t i = 0; i < stages.size(); ++i) {
    ActionTime& rank = own[i % own.size()];
    const auto add = [&](const ActionTime& each) {
      rank.device_s += each.device_s;
      // It has issued all when the last one runs
      rank.host_s = std::min(rank.host_s + each.host_s, rank.device_s);
    };
    add(stages[i].forward);
    for (const auto& [next, first] : stages[i].backwards(job.is_zero_bubble)) {
      add(next);
    }
  }
  return own;
}

/// Seconds that no order of a pipeline's actions can beat: a rank waits for the
/// first micro-batch, does its work, and the last backward goes back.
double least_pipeline_seconds(const HybridJob& job,
                              const std::vector<ActionTimes>& stages) {
  // A repeated steady state may be shorter than a replay by this share
  constexpr double kShare = 0.99;
  const std::vector<ActionTime> own = work_of_ranks(job, stages);
  const auto m = static_cast<double>(job.micro_batches);
  double slowest = 0, around = 0, less = 0;
  for (const ActionTimes& each : stages) {
    for (const bool splits : {false, true}) {
      double sum = 0;
      for (const auto& [next, first] : each.backwards(splits)) {
        sum += std::max(next.device_s - first.device_s,
                        next.host_s - first.host_s);
      }
      less = std::max(less, job.chunks * sum);
    }
  }
  for (std::size_t rank = 0; rank < own.size(); ++rank) {
    slowest = std::max(
        {slowest, m * own[rank].device_s + around, m * own[rank].host_s});
    // Zero bubble fills the wait for its last gradients with those of weights
    const ActionTimes& first = stages[rank];
    around += first.forward.device_s +
              (job.is_zero_bubble ? 0 : first.backward.device_s);
  }
  return kShare * (slowest - less);
}

}  // namespace

pipeline::Schedule schedule_of(const HybridJob& job, int micro_batches) {
  namespace schedules = pipeline::schedules;
  if (job.is_zero_bubble) return schedules::zb_h1(job.pp, micro_batches);
  return job.chunks == 1
             ? schedules::one_f_one_b(job.pp, micro_batches)
             : schedules::interleaved(job.pp, micro_batches, job.chunks);
}

std::vector<double> work_of_ranks(const HybridJob& job,
                                  const std::vector<StageRun>& runs) {
  std::vector<double> seconds;
  for (const ActionTime& each : work_of_ranks(job, times_of(job, runs))) {
    seconds.push_back(std::max(each.device_s, each.host_s));
  }
  return seconds;
}

PipelineTime pipeline_time(const HybridJob& job, const sim::CostModel& costs,
                           const std::vector<StageRun>& runs, double limit_s) {
  const auto m = static_cast<int>(job.micro_batches);
  if (job.pp == 1) {
    const StageRun& run = runs[0];
    if (job.zero_stage >= 2) return {zero_seconds(job, costs, run)};
    const double each = run.forward.s + run.backward.s;
    if (job.is_synchronous) return {m * each};
    if (!job.is_of_chapter()) {
      // The host runs ahead
      const double next = std::max(run.forward.device_s + run.backward.device_s,
                                   run.forward.host_s + run.backward.host_s);
      return {each + (m - 1) * next};
    }
  }
  const double work = least_pipeline_seconds(job, times_of(job, runs));
  const auto p = static_cast<std::size_t>(job.pp);
  if (work >= limit_s) {
    return {work, std::vector<double>(p), std::vector<double>(p, kNoLimit)};
  }
  Replay replay(job, costs, runs);
  // In its steady state a pipeline takes equally long for every p micro-batches
  const int least = least_micro_batches(job);
  if (!job.composes_stages || m <= least + job.pp) return replay.run(m);
  const double first = replay.run(least).seconds;
  PipelineTime time = replay.run(least + job.pp);
  time.seconds += (time.seconds - first) * ((m - least) / job.pp - 1);
  return time;
}

std::vector<std::vector<TimedAction>> timed_actions(
    const HybridJob& job, const std::vector<StageRun>& runs,
    const HybridStep& step) {
  const int shown = std::min(static_cast<int>(job.micro_batches),
                             least_micro_batches(job) + job.pp);
  std::vector<std::vector<TimedAction>> actions(
      static_cast<std::size_t>(job.pp));
  if (job.runs_zero()) {
    const ZeroRun run = zero_run(job);
    for (int b = 0; b < shown; ++b) {
      const double begin_s = b * run.each_s, loss_s = begin_s + run.forward_s;
      const double end_s = begin_s + run.each_s;
      using Kind = pipeline::ActionKind;
      actions[0].push_back({{Kind::kForward, b}, begin_s, loss_s});
      actions[0].push_back({{Kind::kBackward, b}, loss_s, end_s});
    }
    // The last one waits for its sums
    actions[0].back().end_s =
        step.pipeline_s -
        static_cast<double>(job.micro_batches - shown) * run.each_s;
    return actions;
  }
  Replay(job, sim::CostModel(job.cluster), runs).run(shown, &actions);
  return actions;
}

}  // namespace shardbook::planner
