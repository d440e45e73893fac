#pragma once

// Repeated work is simulated until its times repeat, and then multiplied.
//
//   repeat(world, num_micro_batches, [&](std::int64_t i) { ... });
//
// With real data every repetition runs. On shapes, the first few run until two
// in a row have moved every queue of every rank by the same time; the rest, but
// for the last one, is added to clock and ledger without being run. The result
// is the same as if all had run, up to rounding (tests hold it against that),
// and thousands of micro-batches cost no more than ten.

#include <cstdint>
#include <functional>

#include "comm/process_group.h"

namespace shardbook::sim {

/// Calls body(0) ... body(count - 1), which do the same on the same shapes; the
/// first and the last may differ. All ranks of `world` call it together.
void repeat(ProcessGroup& world, std::int64_t count,
            const std::function<void(std::int64_t)>& body);

}  // namespace shardbook::sim
