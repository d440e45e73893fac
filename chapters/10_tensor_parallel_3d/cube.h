#pragma once

// The cube of ranks, and the two layouts that activations have on it.
//
// Rank i + l (j + l k) is (i, j, k). Three matrices of a product lie on it in
// three ways, each spread once over all l^3 ranks (rows, columns):
//
//   X   rows block (i, j) of l^2    columns block k of l
//   W   rows block (k, i) of l^2    columns block j of l
//   Y   rows block (i, k) of l^2    columns block j of l
//
// Y lies as X does with the roles of j and k exchanged: after each linear layer
// the axes are swapped. The layout travels with the activation as its mark
// (core/marks.h), each layer reads it there, and a sum of two layouts is refused.
//
//              rows      columns   INPUT group   OUTPUT group   WEIGHT group
//   straight   (i, j)    k         varies j      varies k       varies i
//   swapped    (i, k)    j         varies k      varies j       varies i

#include <string>
#include <vector>

#include "chapters/08_tensor_parallel_2d/grid.h"
#include "comm/device_mesh.h"
#include "core/ops.h"
#include "core/shards.h"

namespace shardbook::cube {

enum class Layout { kStraight = 1, kSwapped = 2 };
Layout swapped(Layout layout);
const char* layout_name(Layout layout);

/// Marks an activation. Returns it.
Tensor with_layout(const Tensor& x, Layout layout);
/// Throws Error where the tensor carries none.
Layout layout_of(const Tensor& x);

/// A rank's place.
struct Place {
  int l = 1, i = 0, j = 0, k = 0;

  /// Index of this rank's part, of l, of an activation's columns.
  int column_part(Layout layout) const {
    return layout == Layout::kStraight ? k : j;
  }
  /// The same with its part of the rows, of l^2.
  summa::BlockPlace block(Layout layout) const {
    return {i * l + column_part(swapped(layout)), l * l, column_part(layout),
            l};
  }
};
/// The place of rank i + l (j + l k).
Place place_of(int rank, int l);

/// The groups by their roles in one layout.
struct Roles {
  ProcessGroup* input = nullptr;   ///< gathers x; cuts the rows within i
  ProcessGroup* output = nullptr;  ///< sums y; cuts x's columns
  ProcessGroup* weight = nullptr;  ///< gathers the weight; cuts the rows first
  ProcessGroup* input_weight = nullptr;   ///< all rows of x, the same columns
  ProcessGroup* output_weight = nullptr;  ///< all rows of y, the same columns
};

/// One rank's place and groups. The groups must outlive it.
struct Cube {
  Place place;
  Roles straight, swapped;
  /// Keep gathered operands for backward; otherwise gather them again.
  bool keep_gathered = true;

  int l() const { return place.l; }
  int num_ranks() const { return l() * l() * l(); }
  const Roles& roles(Layout layout) const {
    return layout == Layout::kStraight ? straight : swapped;
  }
};

/// Axes "k", "j", "i": i varies fastest.
Topology cube_of(int l);
/// The cube of a mesh with these axes. Collective.
Cube cube_on(DeviceMesh& mesh);
/// The cube root. Throws Error that names `option` and the nearest cubes.
int side_of(int num_ranks, const std::string& option);

/// The part of a weight [in, out] of a layer that reads activations of
/// `layout`; if straight: rows block (k, i), columns block j, of each of `columns`
/// (queries, keys, values).
Shards weight_part(const Place& place, Layout layout,
                   const std::vector<Columns>& columns = {});
/// The columns of an activation of `layout`, of a vector or a table's dim.
Shards column_part(const Place& place, Layout layout, std::int64_t dim = 0,
                   const std::vector<Columns>& columns = {});
/// The part of a table [vocabulary, h]: rows block (j, i), columns block k.
Shards table_part(const Place& place);

/// This rank's rows of a batch that is whole on every rank: first by i, then by
/// j or k. A view.
Tensor own_rows(const Tensor& batch, const Cube& cube, Layout layout);
/// This rank's block of an activation [B, .., N], marked.
Tensor own_block(const Tensor& x, const Cube& cube, Layout layout);

}  // namespace shardbook::cube
