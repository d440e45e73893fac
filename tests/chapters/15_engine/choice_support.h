#pragma once

// A whole run of the strategy that a config chooses.

#include "chapters/15_engine/strategies.h"
#include "tests/chapters/common/claims_support.h"

namespace shardbook::engine {

inline Options options_for(int world_size) {
  return tiny_gpt("15_engine", world_size);
}

/// Compares with one device if the world has data.
inline Report train_choice(const Options& options, const Choice& choice) {
  ChapterRun chapter;
  chapter.fold_class = choice.fold_class;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, choice.topology);
    const auto strategy = choice.make(options, mesh);
    run.train(options, *strategy);
  };
  chapter.reference = choice.reference;
  return run_and_compare(options, chapter);
}

}  // namespace shardbook::engine
