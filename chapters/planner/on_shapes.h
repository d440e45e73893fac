#pragma once

// Runs pieces of a model, and whole chapters, on shapes alone in the `sim`
// world.

#include <cstdint>
#include <functional>
#include <vector>

#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/program.h"
#include "chapters/planner/stage.h"
#include "comm/process_group.h"
#include "sim/cluster.h"

namespace shardbook::planner {

/// Runs `body` on every rank, or on one rank of each class.
void on_shapes(const sim::Cluster& cluster, int ranks,
               const FoldClass& fold_class,
               const std::function<void(ProcessGroup& world)>& body);

/// Which ranks run in place of all with these layers: one world for each entry, of
/// which the slower counts. Ranks of tp do the same; so do replicas, also those that
/// share experts, since tokens are spread evenly. A ring keeps the pace of its
/// slowest rank: the last, which merges most rows, and whose hop leaves the node if
/// one does, or else the first, whose hop may stay in the node. In a mesh of links,
/// where hops differ more, all of it runs at once.
std::vector<FoldClass> ranks_that_run(const sim::Cluster& cluster,
                                      const Topology& topology);

/// GPT with these sizes, and at least as many positions as the sequence has tokens.
ModelConfig gpt_of(const DecoderSizes& sizes, std::int64_t layers);
/// The same of `sizes.model`, where there is one; of its experts, `dense` blocks in
/// front have none.
ModelConfig decoder_of(const DecoderSizes& sizes, std::int64_t layers,
                       std::int64_t dense = 0);

/// Two steps on random data. The cluster, the ranks, the model and the batch
/// are the caller's.
Options shape_options();
/// The hybrid chapter's options for a stage's layers.
hybrid::HybridOptions layer_setup(const DecoderSizes& sizes,
                                  const StageLayout& layout);
/// Trains a chapter with these options.
Report train_on_shapes(
    const Options& options, const FoldClass& fold_class,
    const std::function<void(const Options& options, ProcessGroup& world,
                             Run& run)>& rank);

}  // namespace shardbook::planner
