#pragma once

// Runs on shapes alone, in the `sim` world: of pieces of a model, and of whole
// chapters.

#include <cstdint>
#include <functional>

#include "chapters/common/models/models.h"
#include "chapters/common/run/program.h"
#include "chapters/planner/stage.h"
#include "comm/process_group.h"
#include "sim/cluster.h"

namespace shardbook::planner {

/// `body` on every rank; of those of one class, on one.
void on_shapes(const sim::Cluster& cluster, int ranks,
               const FoldClass& fold_class,
               const std::function<void(ProcessGroup& world)>& body);

/// GPT with these sizes, and as many positions as the sequence has tokens.
ModelConfig gpt_of(const DecoderSizes& sizes, std::int64_t layers);

/// Two steps on random data. The cluster, the ranks, the model and the batch
/// are the caller's.
Options shape_options();
/// A chapter's training with such options.
Report train_on_shapes(
    const Options& options, const FoldClass& fold_class,
    const std::function<void(const Options& options, ProcessGroup& world,
                             Run& run)>& rank);

}  // namespace shardbook::planner
