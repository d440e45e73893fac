#pragma once

// Batch normalisation over the batches of all ranks.
//
// A rank's BatchNorm sees its own samples: d ranks with B/d samples each differ
// from one device with B. A synchronised one sums counts, values and squares
// over the ranks in forward, and two values per channel in backward.

#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::ddp {

/// Turns every BatchNorm below `module` into a synchronised one over the ranks
/// of `group`. Returns how many there are. They use their own subgroup, so
/// their messages do not queue behind buckets. Collective. Per layer of c
/// channels: all-reduces of c + 1 and c values forward and of 2c backward, in
/// f64.
int convert_sync_batchnorm(Module& module, ProcessGroup& group);

}  // namespace shardbook::ddp
