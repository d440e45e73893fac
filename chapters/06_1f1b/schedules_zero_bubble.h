#pragma once

// Zero bubble within a memory limit, found by a search.

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline::schedules {

struct ZeroBubbleSearch {
  /// Sets of activations that a rank may keep: p is what 1F1B's first stage
  /// keeps (ZB-1p), 2p has room for no bubble (ZB-2p). At least 1.
  double memory_limit = 0;
  /// Part of a set that waits for W after I. A transformer layer with
  /// attention matrices: 32/(34 + 5 a s/h), as I alone reads the matrices. Qi
  /// et al. 2023, table 1.
  double weight_share = 1;
  Costs costs;
};

/// A stage forwards as often as fits before the first gradient comes back. From
/// then on all stages go in rounds of one forward and one input gradient; W
/// fills the gaps, and makes room when the limit is hit. Three questions have
/// two answers each: may a forward make the first gradient wait, may one be put
/// off for a gradient, and does W go into every gap that is shorter than W? Of
/// the eight schedules, and ZB-H1 and ZB-H2 where they fit, the one with the
/// smallest bubble. Qi et al. 2023, section 3.1, and as published:
/// sail-sg/zero-bubble-pipeline-parallelism, auto_schedule.py. Cost: p
/// operations per action and variant.
Schedule zb_auto(int num_ranks, int micro_batches,
                 const ZeroBubbleSearch& search);

}  // namespace shardbook::pipeline::schedules
