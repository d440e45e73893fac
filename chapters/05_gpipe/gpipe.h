#pragma once

// GPipe: micro-batches through a chain of stages.
//
//   rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B3--- B2--- B1--- B0---
//   rank 1 |.  F0 F1 F2 F3 .  .  .  .  .  .  B3--- B2--- B1--- B0--- .  .
//   rank 2 |.  .  F0 F1 F2 F3 .  .  .  B3--- B2--- B1--- B0--- .  .  .  .
//   rank 3 |.  .  .  F0 F1 F2 F3 B3--- B2--- B1--- B0--- .  .  .  .  .  .
//
// A backward takes twice as long as a forward here.
//
// Rank s holds stage s. A step runs all forwards, then all backwards from the
// last micro-batch to the first, then one update. One device that accumulates
// gradients over the micro-batches in that order gives the same result.
//
//   const Schedule schedule = gpipe::schedule(world.size(), 8);
//   PipelineModel model(options, layers, layout_of(schedule, cuts), world);
//   Engine engine(schedule, model, world, feed, nullptr,
//                 {Recompute::kExceptLast});
//   engine.run();                                 // sets all gradients
//
// Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using
// Pipeline Parallelism", section 2; Kim et al. 2020, "torchgpipe".

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::gpipe {

/// The actions of each stage, in order: the same list for all. Throws Error for
/// less than one stage or micro-batch. Huang et al. 2019, section 2.3.
pipeline::Schedule schedule(int num_stages, int num_micro_batches);

/// Share of a step in which a stage is idle: (p - 1) / (m + p - 1), however
/// long F and B are. Each stage computes m of both, and a step lasts for
/// m + p - 1 of both.
/// Papers also quote (p - 1) / m, which is idle time over busy time.
double idle_share(int num_stages, int num_micro_batches);

}  // namespace shardbook::gpipe
