#pragma once

namespace shardbook::internal {

/// Cores that this process may run on (its affinity mask, not the machine).
int available_cores();

}  // namespace shardbook::internal
