// Stages from runs of one and of two blocks.

#include <algorithm>
#include <map>
#include <tuple>

#include "chapters/planner/stage.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

using Field = double StageRun::*;

constexpr Field kFields[] = {&StageRun::forward_s,
                             &StageRun::backward_s,
                             &StageRun::first_backward_s,
                             &StageRun::both_s,
                             &StageRun::busy_s,
                             &StageRun::optimizer_s,
                             &StageRun::parameters,
                             &StageRun::expert_parameters,
                             &StageRun::backward_input_s,
                             &StageRun::backward_weight_s,
                             &StageRun::kept_bytes,
                             &StageRun::forward_peak_bytes,
                             &StageRun::backward_peak_bytes,
                             &StageRun::kept_for_weights_bytes};

}  // namespace

const StageRun& known_stage(const sim::Cluster& cluster, const DecoderSizes& of,
                            const StageLayout& options,
                            const StageParts& parts) {
  auto key = std::make_tuple(
      cluster.name, cluster.device.sustained, of.hidden, of.heads, of.seq,
      of.vocabulary, of.kv_heads, of.head_dim, of.window, of.experts,
      of.experts_per_token, of.mlp, of.is_llama, of.is_gated,
      of.normalizes_heads, options.tp, options.cp, options.ep,
      options.sends_once_per_node, options.cuts_tokens, options.recompute,
      options.micro_batch, options.converts_to_fp8, options.scales_by_maximum,
      options.splits_backward, options.dtype, options.dropout, parts.blocks,
      parts.has_embedding, parts.has_head);
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
  const StageRun& two = known_stage(cluster, sizes, layout, fewer);
  const auto further = static_cast<double>(parts.blocks - 1);
  for (const Field field : kFields) {
    run.*field += further * (two.*field - run.*field);
  }
  for (const auto& [link, bytes] : two.sent_bytes) {
    run.sent_bytes[link] += further * (bytes - run.sent_bytes[link]);
  }
  run.passing_gradient_bytes =
      std::max(run.passing_gradient_bytes, two.passing_gradient_bytes);
  run.message_bytes = std::max(run.message_bytes, two.message_bytes);
  run.trust = std::max(run.trust, two.trust);
  return run;
}

}  // namespace shardbook::planner
