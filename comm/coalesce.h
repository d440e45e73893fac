#pragma once

// Many small tensors in few messages.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace shardbook {

/// PyTorch's size of a coalescing buffer.
constexpr std::int64_t kCoalesceBytes = std::int64_t{250} << 20;

/// Consecutive tensors of one dtype and device, as many as fit into
/// `max_bytes` (one that does not fit is a message by itself).
std::vector<Tensors> coalesce(const Tensors& tensors, std::int64_t max_bytes);

/// tensors = the root's tensors, on every rank; one broadcast per piece of
/// `coalesce`. Memory: one more copy of the largest piece of several tensors.
void broadcast_coalesced(ProcessGroup& group, const Tensors& tensors, int root,
                         const std::string& label,
                         std::int64_t max_bytes = kCoalesceBytes);

}  // namespace shardbook
