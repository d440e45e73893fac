#pragma once

// Who holds which block: as text, and as SVG.
//
//   picture_text({held_by("w", {4, 4}, {shard(0), replicate()}, {2, 2})});
//
//   w [4, 4]
//   +-----+
//   | 0 1 |
//   +-----+
//   | 2 3 |
//   +-----+

#include <functional>
#include <string>
#include <vector>

#include "chapters/11_dtensor/placement.h"
#include "core/shards.h"

namespace shardbook::dtensor {

/// A matrix (or a vector, as one column), and the rows and columns that each
/// rank has of it.
struct Held {
  std::string title;
  std::int64_t rows = 1, columns = 1;
  std::vector<std::vector<IndexRun>> rows_of, columns_of;  ///< by rank
};

/// Who holds which part of a vector or a matrix: parts are lists of cuts.
Held held_by(const std::string& name, const Shape& shape, int num_ranks,
             const std::function<Shards(int rank)>& shards);
/// The same for a layout; ranks are numbered row-major over the mesh.
Held held_by(const std::string& name, const Shape& shape,
             const Placements& placements, const Shape& mesh);

/// One below the other. Cells with the same ranks are merged.
std::string picture_text(const std::vector<Held>& all);
/// An SVG of its own; a color per set of ranks.
std::string picture_svg(const std::string& title, const std::vector<Held>& all);

}  // namespace shardbook::dtensor
