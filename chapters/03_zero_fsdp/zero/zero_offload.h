#pragma once

// The host's share of the work: ZeRO-Offload.
//
//   device   parameters (16 bit), forward, backward
//               | gradient shard                ^ updated shard
//               v                               |
//   host     gradient shard, master copy, moments: Adam
//
// The optimizer state is most of what a step keeps and is touched once per
// step, so it moves first. Bytes between host and device are not on the wire
// between ranks, and are counted apart.
//
// Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training",
// section 4.

#include <cstdint>

#include "core/copy_runs.h"
#include "core/stream.h"
#include "core/tensor.h"

namespace shardbook::zero {

struct HostTraffic {
  std::int64_t to_host = 0;    ///< bytes
  std::int64_t to_device = 0;  ///< bytes
};

/// target = source, on the copy stream if they are on two devices; later work
/// on the current stream waits for it. Bytes are added to `traffic` by
/// direction: towards the host of this rank, or away from it.
void copy_across(const Tensor& target, const Tensor& source,
                 HostTraffic& traffic);

/// The same without waiting: the target is complete when the event has passed.
Event begin_copy(const Tensor& target, const Tensor& source,
                 HostTraffic& traffic);

/// For all runs: target += source, or target = source without `accumulates`;
/// the arrays may be on two devices. Memory: a sum across devices needs a copy
/// of each source on the target's device.
void take_runs(const std::vector<CopyRun>& runs, bool accumulates,
               HostTraffic& traffic);

}  // namespace shardbook::zero
