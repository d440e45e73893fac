#pragma once

// Zero bubble within a memory limit, found by a search.

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline::schedules {

struct ZeroBubbleSearch {
  /// Sets of activations that a rank may keep: 1F1B's first stage keeps p
  /// (ZB-1p); with 2p the bubble vanishes (ZB-2p). At least 1.
  double memory_limit = 0;
  /// The part of a set that is kept from I to W. For a transformer layer with
  /// attention matrices: 32/(34 + 5 a s/h), as only I reads the matrices. Qi et
  /// al. 2023, table 1.
  double weight_share = 1;
  Costs costs = {};
};

/// A stage first runs as many F as fit before the first gradient comes back.
/// From then on all stages plan rounds of one F and one I. W fills the gaps,
/// and frees memory when the limit is reached. Three choices give eight
/// variants: an F may delay the first I or not, may be deferred for an I or
/// not, and W fills gaps shorter than W or not. Returns the schedule with the
/// smallest bubble among them, and ZB-H1 and ZB-H2 if they fit into memory. Qi
/// et al. 2023, section 3.1, and the published code:
/// sail-sg/zero-bubble-pipeline-parallelism, auto_schedule.py. Cost: p
/// operations per action and variant.
Schedule zb_auto(int num_ranks, int micro_batches,
                 const ZeroBubbleSearch& search);

}  // namespace shardbook::pipeline::schedules
