// Stages from runs of one and of two blocks.

#include <algorithm>
#include <tuple>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/planner/stage.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

/// To which each further block adds as much as the second.
std::vector<double*> numbers_of(StageRun& run) {
  std::vector<double*> all = {&run.busy_s,         &run.optimizer_s,
                              &run.parameters,     &run.expert_parameters,
                              &run.kept_bytes,     &run.kept_for_weights_bytes,
                              &run.input_gradients};
  for (ActionTime* each : run.all_times()) {
    all.insert(all.end(), {&each->s, &each->device_s, &each->host_s});
  }
  for (Held* each :
       {&run.forward_peak, &run.backward_peaks.head, &run.backward_peaks.blocks,
        &run.backward_peaks.embedding, &run.backward_input_peak,
        &run.backward_weight_peak, &run.first_backward_peaks.head,
        &run.first_backward_peaks.embedding}) {
    all.insert(all.end(),
               {&each->activations, &each->gradients, &each->messages});
  }
  return all;
}

/// Stages of blocks of one kind, by runs of one and of two.
struct BlockKind {
  StageRun one, two;
  DType dtype;

  /// What a block leaves for its backward, and for the weights' part of it; and
  /// its gradients.
  double kept() const { return two.kept_bytes - one.kept_bytes; }
  double kept_for_weights() const {
    return two.kept_for_weights_bytes - one.kept_for_weights_bytes;
  }
  double gradients() const {
    return (two.parameters - one.parameters) *
           static_cast<double>(dtype_bytes(dtype));
  }

  /// So many blocks more, without the peaks below.
  void add_to(StageRun& run, double blocks) {
    const std::vector<double*> sums = numbers_of(run), few = numbers_of(one),
                               more = numbers_of(two);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      *sums[i] += blocks * (*more[i] - *few[i]);
    }
    for (const auto& [link, bytes] : two.sent_bytes) {
      run.sent_bytes[link] += blocks * (bytes - one.sent_bytes[link]);
    }
    run.trust = std::max(run.trust, two.trust);
  }
  /// While a first backward goes on, activations become gradients; in the first
  /// part of a backward, what waits for the second.
  StageRun stage(std::int64_t blocks) {
    StageRun run = one;
    if (blocks == 1) return run;
    const auto further = static_cast<double>(blocks - 1);
    add_to(run, further);
    Held& peak = run.first_backward_peaks.blocks;
    peak = two.first_backward_peaks.blocks;
    (kept() > gradients() ? peak.activations : peak.gradients) +=
        (further - 1) * std::max(kept(), gradients());
    run.backward_input_peak = two.backward_input_peak;
    run.backward_input_peak.activations +=
        (further - 1) * std::max(kept(), kept_for_weights());
    return run;
  }
};

/// `most` becomes the fuller of two moments.
void set_fuller(Held& most, const Held& other) {
  if (other.total() > most.total()) most = other;
}

/// Dense blocks in front of others. A backward is fullest while it goes through the
/// others, or when they have ended.
StageRun both_kinds(BlockKind& dense, std::int64_t in_front, BlockKind& others,
                    std::int64_t behind) {
  StageRun run = others.stage(behind);
  const StageRun front = dense.stage(in_front);
  const auto blocks = static_cast<double>(in_front),
             ended = static_cast<double>(behind);
  Held later = run.backward_input_peak;
  dense.add_to(run, blocks);
  run.first_backward_peaks.blocks.activations += blocks * dense.kept();
  Held first = front.first_backward_peaks.blocks;
  first.gradients += ended * others.gradients();
  set_fuller(run.first_backward_peaks.blocks, first);
  later.activations += blocks * dense.kept();
  run.backward_input_peak = later;
  first = front.backward_input_peak;
  first.activations += ended * others.kept_for_weights();
  set_fuller(run.backward_input_peak, first);
  run.sizes.dense_block = front.sizes.dense_block;
  return run;
}

}  // namespace

const StageRun& known_stage(const sim::Cluster& cluster, const DecoderSizes& of,
                            const StageLayout& options,
                            const StageParts& parts) {
  return once_for(std::make_tuple(cluster.name, cluster.device.sustained,
                                  of.key(), options.key(), parts.key()),
                  [&] { return run_stage(cluster, of, options, parts); });
}

StageRun composed_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                        const StageLayout& layout, const StageParts& parts) {
  SB_CHECK(sizes.window == 0,
           "blocks with and without a window alternate: run the whole stage");
  if (parts.blocks <= 1) return known_stage(cluster, sizes, layout, parts);
  const auto kind_of = [&](bool is_dense) {
    StageParts few = parts;
    few.blocks = 1, few.dense = is_dense ? 1 : 0;
    const StageRun one = known_stage(cluster, sizes, layout, few);
    few.blocks = 2, few.dense = is_dense ? 2 : 0;
    return BlockKind{one, known_stage(cluster, sizes, layout, few),
                     layout.dtype};
  };
  const std::int64_t others = parts.blocks - parts.dense;
  BlockKind kind = kind_of(others == 0);
  StageRun run;
  if (others == 0 || parts.dense == 0) {
    run = kind.stage(parts.blocks);
  } else {
    BlockKind dense = kind_of(true);
    run = both_kinds(dense, parts.dense, kind, others);
  }
  // Work that hides the host of few blocks may not hide that of more
  for (ActionTime* each : run.all_times()) {
    each->s = std::max(each->s, each->host_s);
  }
  run.sizes.blocks = parts.blocks;
  run.sizes.dense = parts.dense;
  return run;
}

}  // namespace shardbook::planner
