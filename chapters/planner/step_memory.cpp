// The memory of a step, by closed forms.

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
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

/// All activations of a rank, when it has most of them.
double activations_of(const HybridJob& job, const std::vector<StageRun>& runs,
                      int pp_rank) {
  double kept = 0, peak = 0;
  for (int chunk = 0; chunk < job.chunks; ++chunk) {
    const StageRun& run =
        runs[static_cast<std::size_t>(chunk * job.pp + pp_rank)];
    // The head's set is let go at once: its backward follows its forward
    const bool is_last = pp_rank == job.pp - 1 && chunk == job.chunks - 1;
    if (!is_last || job.chunks == 1) kept = std::max(kept, run.kept_bytes);
    peak = std::max({peak, run.forward_peak_bytes, run.backward_peak_bytes});
  }
  return (live_sets(job, pp_rank) - 1) * kept + peak;
}

}  // namespace

StepMemory step_memory(const HybridJob& job) {
  SB_CHECK(job.layout.recompute != Recompute::kEverySecondProduct,
           "the memory of blocks that compute every second product again is "
           "not predicted");
  const std::vector<StageRun> runs = runs_of(job);
  const auto element = static_cast<double>(dtype_bytes(job.layout.dtype));
  // An optimizer with two moments, and f32 copies of 16-bit parameters
  const zero::StateBytes bytes = {element, element, element < 4 ? 12.0 : 8.0};
  const int stage = job.zero_stage >= 2 ? job.zero_stage
                    : job.distributes() ? 1
                                        : 0;
  StepMemory most;
  for (int rank = 0; rank < job.pp; ++rank) {
    const double parameters = parameters_of(job, runs, rank);
    const zero::ModelStates states =
        zero::model_states(stage, parameters, job.replicas(), bytes);
    StepMemory memory;
    memory.pp_rank = rank;
    memory.parameters = states.parameters;
    memory.gradients = states.gradients;
    memory.optimizer = states.optimizer;
    double passing = 0;
    for (int chunk = 0; chunk < job.chunks; ++chunk) {
      const StageRun& run =
          runs[static_cast<std::size_t>(chunk * job.pp + rank)];
      passing = std::max(passing, run.passing_gradient_bytes);
      memory.messages = std::max(memory.messages, run.message_bytes);
    }
    const double table = table_elements(job);
    const double block = stage >= 2 ? block_elements(job, runs[0]) : 0;
    if (stage <= 1) {
      memory.gradients += job.micro_batches > 1 ? passing : 0;
    } else {
      // Gradients that pass: the table's part from the head, which waits for
      // the embedding's, and the largest of a block's matrices
      memory.gradients += element * (table + block / 3);
    }
    if (stage == 3) {
      // Gathered: the table and a block; the next one is still a message
      memory.parameters += element * (table + block);
      memory.messages += 2 * element * block;
    } else if (job.distributes()) {
      memory.messages += (stage == 2 ? 2 : 1) * job.bucket_bytes;
    }
    memory.activations = activations_of(job, runs, rank);
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
