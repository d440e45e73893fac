#pragma once

// What ranks compute on their blocks where core has no operation for it.

#include <cstdint>

#include "core/tensor.h"

namespace shardbook::dtensor {

/// embedding_part of a table whose shard may be empty: zeros for indices of other
/// ranks' rows. The sum over the ranks is the lookup in the whole table.
/// Vocabulary-parallel embedding of Megatron-LM.
Tensor embedding_of_rows(const Tensor& table, const Tensor& indices,
                         std::int64_t first);

/// Largest (or smallest) along `dim`, which disappears; -inf (inf) where there
/// is none. No gradient.
Tensor extreme(const Tensor& x, std::int64_t dim, bool is_max);

}  // namespace shardbook::dtensor
