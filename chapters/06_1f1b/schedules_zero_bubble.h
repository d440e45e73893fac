#pragma once

// Zero bubble within a memory limit, found by a search.

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline::schedules {

struct ZeroBubbleSearch {
  /// Sets of activations that a rank may keep: 1F1B's first stage keeps p
  /// (ZB-1p); 2p is enough for no bubble (ZB-2p). At least 1.
  double memory_limit = 0;
  /// The part of a set that is kept from I to W. A transformer layer with
  /// attention matrices has 32/(34 + 5 a s/h), because only I reads the
  /// matrices. Qi et al. 2023, table 1.
  double weight_share = 1;
  Costs costs;
};

/// A stage first runs as many F as fit before the first gradient comes back.
/// From then on all stages plan rounds of one F and one I. W fills the gaps,
/// and frees memory when the limit is reached. Three questions have two answers
/// each: may an F delay the first I, may an F be put off for an I, and does W
/// go into every gap that is shorter than W? Returns the schedule with the
/// smallest bubble of these eight, and of ZB-H1 and ZB-H2 if they fit into the
/// memory. Qi et al. 2023, section 3.1, and the published code:
/// sail-sg/zero-bubble-pipeline-parallelism, auto_schedule.py. Cost: p
/// operations per action and variant.
Schedule zb_auto(int num_ranks, int micro_batches,
                 const ZeroBubbleSearch& search);

}  // namespace shardbook::pipeline::schedules
