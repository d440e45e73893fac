#pragma once

// How a global batch is cut into pieces.

#include <cstdint>
#include <vector>

#include "core/context.h"

namespace shardbook {

/// Rows of a global batch that are computed together.
struct MicroBatch {
  BatchSlice slice;
  std::int64_t rows = 0;
};
/// Throws Error unless 1 <= n <= batch: a mistake in the command, to be told
/// before ranks start.
void check_micro_batches(std::int64_t batch, std::int64_t n);
/// n pieces, piece i takes rows i, i + n, ..., as data-parallel ranks do.
/// Throws Error unless 1 <= n <= batch.
std::vector<MicroBatch> strided_micro_batches(std::int64_t batch,
                                              std::int64_t n);
/// Consecutive rows, ceil(batch / n) at a time, the last piece short: rule
/// CEIL, which may give fewer than n pieces. Pipelines cut batches by it.
std::vector<MicroBatch> ceil_micro_batches(std::int64_t batch, std::int64_t n);

}  // namespace shardbook
