#pragma once

// Whole runs of expert parallelism.

#include <functional>

#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

namespace shardbook::moe {

using Reference = std::function<ReferenceRun(const Options&)>;

/// Trains, and compares with one device or with `reference`.
inline Report train_on(const Options& options, const StrategyOptions& setup,
                       const Reference& reference = {}) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, expert_topology(group_sizes(options, setup)));
    MoeStrategy strategy(options, setup, mesh);
    run.train(options, strategy);
  };
  chapter.fold_class = fold_class(options, setup);
  chapter.reference = [&](const Options& options) {
    return reference ? reference(options) : train_reference(options, setup);
  };
  return run_and_compare(options, chapter);
}

}  // namespace shardbook::moe
