#pragma once

// Whole runs of expert parallelism.

#include <cstdint>
#include <functional>
#include <string>

#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

namespace shardbook::moe {

/// Degrees and variants of a run.
struct Form {
  std::string name;
  int world = 4, ep = 0, tp = 1, zero = 0;
  std::int64_t micro = 1, k = 1;
  bool swapped = false, expert_tp = false, offload = false;
};

inline StrategyOptions setup_of(const Form& form) {
  StrategyOptions setup;
  setup.ep = form.ep, setup.tp = form.tp, setup.zero_stage = form.zero;
  setup.micro_batches = form.micro;
  setup.data_before_expert = form.swapped;
  setup.cpu_offload = form.offload;
  setup.moe.expert_tensor_parallel = form.expert_tp;
  setup.moe.gate.k = form.k;
  return setup;
}

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
