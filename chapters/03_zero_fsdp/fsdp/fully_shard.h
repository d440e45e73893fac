#pragma once

// FSDP v2: every parameter is sharded by itself, along dim 0.
//
//   auto model = fully_shard(gpt, {&gpt.h[0], &gpt.h[1]}, world);
//
// A unit still sends one all-gather and one reduce-scatter; since each rank's
// rows of every parameter travel together, they are copied into and out of the
// message. The gain: optimizer state and state dicts per parameter, trained and
// frozen parameters side by side, no padding between parameters of even rows.
// Parameters with fewer rows than ranks leave some ranks without a part.
//
// pytorch/pytorch, torch/distributed/fsdp/_fully_shard.

#include <memory>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"

namespace shardbook::fsdp {

/// `root` with these modules as units (PyTorch calls fully_shard on each, and
/// on the root last). options.per_parameter is set; a policy adds units.
std::unique_ptr<FullyShardedDataParallel> fully_shard(
    Module& root, const std::vector<Module*>& modules, ProcessGroup& group,
    FsdpOptions options = {});

}  // namespace shardbook::fsdp
