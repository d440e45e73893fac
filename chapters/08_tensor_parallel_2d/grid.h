#pragma once

// The square of ranks, and the groups that its ranks form.
//
//              j = 0      j = 1
//   i = 0    (0, 0)     (0, 1)     <- a ROW group: fixed i, its local rank is j
//   i = 1    (1, 0)     (1, 1)
//               ^
//               a COL group: fixed j, its local rank is i
//
// A matrix of M x N lies on the grid in q x q blocks: rank (i, j) has the i-th of
// q blocks of rows and the j-th of q blocks of columns. A vector of N is cut
// into q pieces over j, and each piece into q over i: nothing is stored twice.
//
// With a depth (the 2.5D chapter) there are d of these squares, one above the
// other. Weights are the same in all of them; the rows of a batch are cut into d
// times as many parts.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/device_mesh.h"
#include "core/ops.h"
#include "core/shards.h"

namespace shardbook::summa {

/// An activation's block on a rank: its index among `rows` parts of the rows
/// and `columns` parts of the columns.
struct BlockPlace {
  int row = 0, rows = 1;
  int column = 0, columns = 1;
};

/// A rank's place in its square.
struct Place {
  int q = 1, i = 0, j = 0;
};
/// The place of rank j + q (i + q k).
Place place_of(int rank, int q);

/// One rank's place and groups. The groups must outlive it.
struct Grid {
  ProcessGroup* row = nullptr;    ///< fixed i and k; local rank is j
  ProcessGroup* col = nullptr;    ///< fixed j and k; local rank is i
  ProcessGroup* depth = nullptr;  ///< fixed i and j; local rank is k
  /// Fixed j: the ranks with other rows of the batch; `col` without depth.
  ProcessGroup* batch = nullptr;

  int q() const { return row->size(); }
  int d() const { return depth == nullptr ? 1 : depth->size(); }
  int i() const { return col->rank(); }
  int j() const { return row->rank(); }
  int k() const { return depth == nullptr ? 0 : depth->rank(); }
  Place place() const { return {q(), i(), j()}; }
  int num_ranks() const { return d() * q() * q(); }
  /// Number of parts of a batch's rows, and the index of this rank's part.
  int row_parts() const { return d() * q(); }
  int row_part() const { return k() * q() + i(); }
  BlockPlace block() const { return {row_part(), row_parts(), j(), q()}; }
};

/// Axes of a mesh whose group along "row" is the ROW group: rank = q i + j.
Topology square(int q);
/// The square of a mesh with axes "col" and "row", or "dep", "col" and "row".
/// The first call on a mesh with depth is collective.
Grid grid_of(DeviceMesh& mesh);
/// sqrt(num_ranks / depth). Throws Error that names `option` and the nearest
/// numbers of ranks that form squares.
int side_of(int num_ranks, int depth, const std::string& option);

/// Block (i, j) of a matrix. With `columns`, each of them is cut over j: attention
/// has queries, keys and values.
Shards matrix_part(const Place& place,
                   const std::vector<Columns>& columns = {});
/// Piece i of piece j of a vector, or of the columns of a table.
Shards vector_part(const Place& place, std::int64_t dim = 0,
                   const std::vector<Columns>& columns = {});

/// This rank's rows of dim 0 of a batch, which is whole on every rank: first by
/// depth, then by COL. A view.
Tensor own_rows(const Tensor& batch, const BlockPlace& at);
inline Tensor own_rows(const Tensor& batch, const Grid& grid) {
  return own_rows(batch, grid.block());
}
/// This rank's block of an activation [B, .., N]: own rows, and columns by j.
Tensor own_block(const Tensor& x, const BlockPlace& at);
inline Tensor own_block(const Tensor& x, const Grid& grid) {
  return own_block(x, grid.block());
}

}  // namespace shardbook::summa
