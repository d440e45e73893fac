#pragma once

// GPipe: micro-batches through a chain of stages.
//
//   slot     0  1  2  3  4  5  6  7  8  9 10 11 12 13
//   rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
//   rank 1 |.  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0 .
//   rank 2 |.  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .  .
//   rank 3 |.  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .  .
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

/// Share of idle slots among the 2 (m + p - 1) slots of a stage, with one slot
/// for each F and B: (p - 1) / (m + p - 1).
/// Papers also quote (p - 1) / m, which is idle time over busy time.
double idle_share(int num_stages, int num_micro_batches);

}  // namespace shardbook::gpipe
