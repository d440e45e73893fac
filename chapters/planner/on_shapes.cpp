#include "chapters/planner/on_shapes.h"

#include <algorithm>
#include <memory>

#include "sim/cost_model.h"
#include "sim/world.h"

namespace shardbook::planner {

bool DecoderSizes::has_own_experts() const {
  return model != nullptr && model->llama.num_experts > 0;
}

std::int64_t DecoderSizes::chosen_experts() const {
  return has_own_experts() ? model->llama.experts_per_token : experts_per_token;
}

std::int64_t DecoderSizes::dense_blocks() const {
  std::int64_t dense = 0;
  if (!has_own_experts()) return dense;
  while (dense < model->n_layer && !model->llama.has_experts_in(dense)) ++dense;
  return dense;
}

void on_shapes(const sim::Cluster& cluster, int ranks,
               const FoldClass& fold_class,
               const std::function<void(ProcessGroup& world)>& body) {
  sim::WorldOptions world;
  world.launch.backend = "sim";
  world.cost = std::make_shared<const sim::CostModel>(cluster);
  world.fold_class = fold_class;
  world.num_recorded_ranks = 0;
  sim::run_world(ranks, body, world);
}

std::vector<FoldClass> ranks_that_run(const sim::Cluster& cluster,
                                      const Topology& topology) {
  const int tp = topology.size("tp"), cp = topology.size("cp");
  if (!cluster.mesh.empty() && cp > 1) {
    return {[=](int rank) { return rank / tp % cp * tp; }};
  }
  const auto runs = [](int rank) { return [=](int) { return rank; }; };
  const int last = (cp - 1) * tp;
  const auto hops_inside = [&](int rank) {
    return cluster.node_of(rank) == cluster.node_of((rank + tp) % (cp * tp));
  };
  if (hops_inside(0) == hops_inside(last)) return {runs(last)};
  return {runs(last), runs(0)};
}

ModelConfig gpt_of(const DecoderSizes& sizes, std::int64_t layers) {
  ModelConfig config;
  config.n_embd = sizes.hidden;
  config.n_head = sizes.heads;
  config.n_positions = std::max(sizes.positions, sizes.seq);
  config.n_layer = layers;
  config.vocab_size = sizes.vocabulary;
  return config;
}

ModelConfig decoder_of(const DecoderSizes& sizes, std::int64_t layers,
                       std::int64_t dense) {
  if (sizes.model == nullptr) return gpt_of(sizes, layers);
  ModelConfig config = *sizes.model;
  config.n_layer = layers;
  config.n_positions = std::max(sizes.positions, sizes.seq);
  config.vocab_size = sizes.vocabulary;
  if (sizes.has_own_experts()) {
    std::vector<bool>& has_experts = config.llama.has_experts;
    has_experts.assign(static_cast<std::size_t>(layers), true);
    std::fill_n(has_experts.begin(), dense, false);
  }
  return config;
}

Options shape_options() {
  Options options;
  options.backend = "sim";
  options.data = "random";
  options.steps = 2;
  options.check = false;
  return options;
}

hybrid::HybridOptions layer_setup(const DecoderSizes& sizes,
                                  const StageLayout& layout) {
  hybrid::HybridOptions setup;
  setup.tp = layout.tp;
  setup.cp = layout.cp;
  setup.sequence_parallel = layout.cuts_tokens;
  setup.has_own_experts = sizes.has_own_experts();
  if (setup.has_own_experts) setup.ep = layout.ep;
  if (layout.cp > 1) setup.cp_layout = "zigzag";
  setup.recompute = layout.recompute == Recompute::kAttention ? "attention"
                    : layout.recompute == Recompute::kBlocks  ? "blocks"
                                                              : "never";
  return setup;
}

Report train_on_shapes(
    const Options& options, const FoldClass& fold_class,
    const std::function<void(const Options& options, ProcessGroup& world,
                             Run& run)>& rank) {
  ChapterRun chapter;
  chapter.rank = rank;
  chapter.fold_class = fold_class;
  return run_and_compare(options, chapter);
}

}  // namespace shardbook::planner
