// Stages from runs of one and of two blocks.

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/planner/stage.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

/// To which each further block adds as much as the second.
std::vector<double*> numbers_of(StageRun& run) {
  std::vector<double*> all = {&run.forward_s,
                              &run.backward_s,
                              &run.first_backward_s,
                              &run.busy_s,
                              &run.optimizer_s,
                              &run.parameters,
                              &run.expert_parameters,
                              &run.backward_input_s,
                              &run.backward_weight_s,
                              &run.first_backward_input_s,
                              &run.first_backward_weight_s,
                              &run.kept_bytes,
                              &run.kept_for_weights_bytes,
                              &run.input_gradients};
  for (Ahead* each :
       {&run.forward_ahead, &run.backward_ahead, &run.first_backward_ahead,
        &run.backward_input_ahead, &run.backward_weight_ahead,
        &run.first_backward_input_ahead, &run.first_backward_weight_ahead}) {
    all.insert(all.end(), {&each->device_s, &each->host_s});
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

}  // namespace

const StageRun& known_stage(const sim::Cluster& cluster, const DecoderSizes& of,
                            const StageLayout& options,
                            const StageParts& parts) {
  auto key = std::make_tuple(cluster.name, cluster.device.sustained, of.key(),
                             options.key(), parts.blocks, parts.has_embedding,
                             parts.has_head, parts.is_tied);
  static std::map<decltype(key), StageRun> known;
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = run_stage(cluster, of, options, parts);
}

StageRun composed_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                        const StageLayout& layout, const StageParts& parts) {
  SB_CHECK(sizes.window == 0,
           "blocks with and without a window alternate: run the whole stage");
  if (parts.blocks < 1) return known_stage(cluster, sizes, layout, parts);
  StageParts fewer = parts;
  fewer.blocks = 1;
  StageRun run = known_stage(cluster, sizes, layout, fewer);
  if (parts.blocks == 1) return run;
  fewer.blocks = 2;
  StageRun two = known_stage(cluster, sizes, layout, fewer);
  // Of a block
  const double kept = two.kept_bytes - run.kept_bytes;
  const double kept_for_weights =
      two.kept_for_weights_bytes - run.kept_for_weights_bytes;
  const double gradients = (two.parameters - run.parameters) *
                           static_cast<double>(dtype_bytes(layout.dtype));
  const auto further = static_cast<double>(parts.blocks - 1);
  const std::vector<double*> sums = numbers_of(run), both = numbers_of(two);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    *sums[i] += further * (*both[i] - *sums[i]);
  }
  // Work that hides the host of few blocks may not hide that of more
  const std::pair<double*, Ahead> hosts[] = {
      {&run.forward_s, run.forward_ahead},
      {&run.backward_s, run.backward_ahead},
      {&run.first_backward_s, run.first_backward_ahead},
      {&run.backward_input_s, run.backward_input_ahead},
      {&run.backward_weight_s, run.backward_weight_ahead},
      {&run.first_backward_input_s, run.first_backward_input_ahead},
      {&run.first_backward_weight_s, run.first_backward_weight_ahead}};
  for (const auto& [alone_s, ahead] : hosts) {
    *alone_s = std::max(*alone_s, ahead.host_s);
  }
  // While a first backward goes on, activations become gradients; in the first
  // part of a backward, what waits for the second
  Held& blocks = run.first_backward_peaks.blocks;
  blocks = two.first_backward_peaks.blocks;
  (kept > gradients ? blocks.activations : blocks.gradients) +=
      (further - 1) * std::max(kept, gradients);
  run.backward_input_peak = two.backward_input_peak;
  run.backward_input_peak.activations +=
      (further - 1) * std::max(kept, kept_for_weights);
  for (const auto& [link, bytes] : two.sent_bytes) {
    run.sent_bytes[link] += further * (bytes - run.sent_bytes[link]);
  }
  run.sizes.blocks = parts.blocks;
  run.trust = std::max(run.trust, two.trust);
  return run;
}

}  // namespace shardbook::planner
