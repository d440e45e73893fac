#pragma once

// From one layout to another, on plain arrays: the moves of moves.h.

#include <cstdint>

#include "chapters/11_dtensor/mesh.h"
#include "chapters/11_dtensor/moves.h"
#include "chapters/11_dtensor/placement.h"

namespace shardbook::dtensor {

/// The local array of layout `to` from the array of layout `from`. Collective
/// over the axes that communicate; not recorded for backward. Where nothing
/// moves, the result shares the memory of `local`.
Tensor redistribute_local(const Tensor& local, const Mesh& mesh,
                          const Shape& global, const Placements& from,
                          const Placements& to);

/// This rank's part of the root's `whole` along `dim`. One scatter of the parts,
/// padded.
Tensor scatter_local(const Tensor& whole, ProcessGroup& group,
                     std::int64_t dim);

}  // namespace shardbook::dtensor
