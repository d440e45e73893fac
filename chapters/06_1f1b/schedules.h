#pragma once

// The schedules of the literature.
//
//   schedule       time lost to bubbles     live activations of stage s
//   naive          (p-1) m (F+B)            1
//   gpipe          (p-1) (F+B)              m
//   1f1b           (p-1) (F+B)              min(p-s, m)
//   interleaved    (p-1) (F+B) / v          2(p-s-1) + (v-1)p + 1 chunks
//   zb-h1          (p-1) (F+I-W)            p
//   zb-h2          none if F = I = W        2p-1
//   zb-auto        smallest found           up to the memory limit
//   dualpipe       (p/2-1) (F&B + B - 3W)   p+1; two stages per rank
//   pipedream      none after the warm-up   p-s; as many versions of weights
//   pipedream-2bw  none after the warm-up   p-s; two versions
//
// The list of `gpipe` is in the GPipe chapter. There are p ranks, m
// micro-batches and v chunks per rank. F and B = I + W are the times of one
// stage of p; F&B is the time of an overlapped pair. A bubble is the idle time
// of a rank between its first and its last action. A set of activations lives
// from F to B (or W).
//
// All functions throw Error for impossible numbers, with a message that begins
// with the option ("--schedule interleaved: ...").

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline::schedules {

/// One micro-batch after another passes through the whole pipeline.
Schedule naive(int num_ranks, int micro_batches);

/// Stage s: min(p-1-s, m) forwards, then one forward and one backward in turn,
/// then the remaining backwards. Megatron-LM's formulation of PipeDream-Flush:
/// Narayanan et al. 2021, section 2.2.1.
Schedule one_f_one_b(int num_ranks, int micro_batches);

/// v chunks per rank: stage j is on rank j mod p, chunk j div p. Chunks take
/// turns after p micro-batches; m is a multiple of p. Forwards and backwards
/// alternate even if m = p, where older versions of Megatron-LM ran all
/// forwards first. Narayanan et al. 2021, section 2.2.2.
Schedule interleaved(int num_ranks, int micro_batches, int chunks);

/// 1F1B whose backwards are split: on stage s, W of micro-batch i-s follows I
/// of micro-batch i. Qi et al. 2023, section 2.
Schedule zb_h1(int num_ranks, int micro_batches);
/// Stage s begins with 2(p-s)-1 forwards; W of micro-batch i-2s follows I of
/// micro-batch i. Twice the activations, and no bubble if F, I and W are equal.
/// Qi et al. 2023, section 2.
Schedule zb_h2(int num_ranks, int micro_batches);

/// Limits and times of `zb_auto`.
struct ZeroBubbleSearch {
  /// Sets of activations that a rank may keep: 1F1B's first stage keeps p
  /// (ZB-1p); with 2p the bubble vanishes (ZB-2p). At least 1.
  double memory_limit = 0;
  /// The part of a set that is kept from I to W. For a transformer layer with
  /// attention matrices: 32/(34 + 5 a s/h), as only I reads the matrices. Qi et
  /// al. 2023, table 1.
  double weight_share = 1;
  Costs costs = {};
};

/// A stage first runs as many F as fit before the first gradient comes back.
/// From then on all stages plan rounds of one F and one I. W fills the gaps,
/// and frees memory when the limit is reached. Three choices give eight
/// variants: an F may delay the first I or not, may be deferred for an I or
/// not, and W fills gaps shorter than W or not. Returns the schedule with the
/// smallest bubble among them, and ZB-H1 and ZB-H2 if they fit into memory. Qi
/// et al. 2023, section 3.1, and the published code:
/// sail-sg/zero-bubble-pipeline-parallelism, auto_schedule.py. Cost: p
/// operations per action and variant.
Schedule zb_auto(int num_ranks, int micro_batches,
                 const ZeroBubbleSearch& search);

/// Two directions: half of the micro-batches enter at rank 0, half at rank p-1.
/// Rank r holds stage r for the first direction (chunk 0) and stage p-1-r for
/// the second (chunk 1); forwards of one direction overlap backwards of the
/// other. p is even, m is even and at least 2p. DeepSeek-V3, section 3.2;
/// deepseek-ai/DualPipe.
Schedule dualpipe(int num_ranks, int micro_batches);

/// No flush: an update after every backward. replicas[s] ranks hold stage s, in
/// order; mini-batch b goes to replica b mod replicas[s], and the replicas of a
/// stage average their gradients. With one replica each, stage s forwards
/// mini-batch b with version max(0, b - (p-1-s)) of the weights, and with
/// `vertical_sync` max(0, b - (p-1)). Narayanan et al. 2019, section 3.
Schedule pipedream(const std::vector<int>& replicas, int mini_batches,
                   bool vertical_sync = false);
Schedule pipedream(int num_ranks, int mini_batches, bool vertical_sync = false);
/// 1F1B without a flush over `batches` batches of m >= p micro-batches; an
/// update after each. Batch n reads version max(0, n-1) at every stage.
/// Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training",
/// section 3.1.
Schedule pipedream_2bw(int num_ranks, int micro_batches, int batches);

/// The number of steps in the lists of a run without a flush: `steps`, or fewer
/// if Schedule::repeats can add the rest. `round` is the number of steps after
/// which all stages repeat their actions: the least common multiple of the
/// replicas, and a divisor of `steps`.
std::int64_t listed_steps(std::int64_t steps, int num_ranks, int round);

/// Options of the command line.
struct ScheduleOptions {
  int num_ranks = 1;
  int micro_batches = 1;    ///< of one batch
  int chunks = 2;           ///< per rank: interleaved
  int batches = 1;          ///< pipedream, pipedream-2bw: without a flush
  double memory_limit = 0;  ///< zb-auto: sets of activations; 0: 2p
  std::vector<int> replicas = {};  ///< pipedream, by stage; none: one each
};
/// Names that make_schedule knows.
const std::vector<std::string>& schedule_names();
/// The schedule of this name, or from FILE.json, which must have the ranks and
/// micro-batches of the options. For an unknown name it throws an Error that
/// lists the names.
Schedule make_schedule(const std::string& name, const ScheduleOptions& options);

}  // namespace shardbook::pipeline::schedules
