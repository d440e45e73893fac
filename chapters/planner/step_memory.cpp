// The memory of a step, by closed forms.

#include <algorithm>

#include "chapters/planner/step_parts.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

/// Sets of activations that a rank keeps at the same time, one of which is
/// being computed; those of one chunk each. The table of the 1F1B chapter.
int live_sets(const HybridJob& job, int pp_rank) {
  const int p = job.pp, v = job.chunks;
  const auto m = static_cast<int>(job.micro_batches);
  if (job.is_zero_bubble) return std::min(p, m);
  if (v == 1) return std::min(p - pp_rank, m);
  return std::min(2 * (p - pp_rank - 1) + (v - 1) * p + 1, m * v);
}

}  // namespace

// With Adam, and f32 copies of 16-bit parameters
zero::ModelStates HybridJob::states(double parameters) const {
  return zero::model_states(zero_stage, parameters, replicas(),
                            zero::state_bytes(layout.dtype, "adamw", {}));
}

StepMemory step_memory(const HybridJob& job) {
  SB_CHECK(job.layout.recompute != Recompute::kEverySecondProduct,
           "the memory of blocks that compute every second product again is "
           "not predicted");
  const std::vector<StageRun> runs = runs_of(job), ranks = ranks_of(job, runs);
  const double element = job.element(), table = job.table();
  const int stage = job.zero_stage;
  StepMemory most;
  for (int rank = 0; rank < job.pp; ++rank) {
    const StageRun& run = ranks[static_cast<std::size_t>(rank)];
    const zero::ModelStates states = job.states(run.parameters);
    StepMemory memory;
    memory.parameters = states.parameters;
    memory.gradients = states.gradients;
    memory.optimizer = states.optimizer;
    memory.messages = run.message_bytes;
    memory.activations =
        (live_sets(job, rank) - 1) * run.kept_bytes +
        std::max(run.forward_peak_bytes, run.backward_peak_bytes);
    const double block = stage >= 2 ? block_elements(job, runs[0]) : 0;
    if (stage <= 1) {
      memory.gradients +=
          job.micro_batches > 1 ? run.passing_gradient_bytes : 0;
    } else {
      // Gradients that pass: the table's part from the head, which waits for
      // the embedding's, and the largest of a block's matrices
      memory.gradients += element * (table + block / 3);
    }
    if (stage == 3) {
      // Gathered: the table and a block; the next one is still a message
      memory.parameters += element * (table + block);
      memory.messages += 2 * element * block;
    } else {
      memory.messages += stage * job.bucket_bytes;
    }
    if (job.offloads) {
      const double shards = stage == 3 ? states.parameters : 0;
      memory.host = states.optimizer + states.gradients + shards;
      memory.optimizer = 0;
      memory.gradients -= states.gradients;
      memory.parameters -= shards;
    }
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

}  // namespace shardbook::planner
