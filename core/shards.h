#pragma once

// Parts of a parameter: which of its elements a rank holds.
//
//   Shards{{1, r, t, 3}}            // c_attn's weight: r's heads of q, k and v
//   Shards{{0, i, q}, {1, j, q}}    // block (i, j) of a matrix on q x q ranks
//   Shards{{0, j, q}, {0, i, q}}    // piece i of piece j of a vector
//   Shards{{0, r, d, 1, rows}}      // part r of rows that d need not divide
//   Shards{cut_columns(1, r, t, {{96, 6}, {32, 2}, {32, 2}})}  // of 2 key heads
//
// The same list draws a part of the initial weights, takes it out of a file,
// and puts it back into the whole.

#include <cstdint>
#include <functional>
#include <vector>

#include "core/tensor.h"

namespace shardbook {

/// Columns of a matrix that are cut together with others beside them. Into `parts`
/// parts at most (heads of keys): more ranks than that share one.
struct Columns {
  std::int64_t width = 0;
  std::int64_t parts = 1;

  /// Parts on `ranks` ranks.
  std::int64_t parts_on(std::int64_t ranks) const {
    return parts < ranks ? parts : ranks;
  }
  bool operator==(const Columns& other) const {
    return width == other.width && parts == other.parts;
  }
};

/// A part of a tensor: `dim` is cut into `blocks` equal blocks (attention's
/// queries, keys and values are three), and each block into `count` equal
/// parts, of which this is number `index`. A count of 1 means all of it.
///
/// With `length`, the elements of `dim` before this cut, parts may be uneven:
/// each has ceil(length / count), and the last ones are short or empty
/// (torch.chunk).
///
/// With `columns`, the blocks have these widths, and one with fewer parts than
/// `count` has each part on several neighbours.
struct Shard {
  std::int64_t dim = 0;
  std::int64_t index = 0;
  std::int64_t count = 1;
  std::int64_t blocks = 1;
  std::int64_t length = 0;
  std::vector<Columns> columns = {};

  bool operator==(const Shard& other) const {
    return dim == other.dim && index == other.index && count == other.count &&
           blocks == other.blocks && length == other.length &&
           columns == other.columns;
  }
};
/// Part `index` of `count` of each of these columns: blocks where they are equal
/// and no rank shares one.
Shard cut_columns(std::int64_t dim, std::int64_t index, std::int64_t count,
                  const std::vector<Columns>& columns);
/// Cuts one after another: each cuts what the one before has left.
using Shards = std::vector<Shard>;

/// The shape of the part of a tensor of shape `whole`. Throws Error when a
/// dimension does not divide, or differs from a shard's `length`.
Shape shape_of(const Shards& shards, const Shape& whole);
/// The shape of the tensor that has a part of shape `part`.
Shape whole_shape(const Shards& shards, Shape part);

/// Consecutive indices of the whole along one dimension.
struct IndexRun {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
/// The indices along `dim` that the part holds, in the part's order.
std::vector<IndexRun> runs_of(const Shards& shards, const Shape& whole,
                              std::int64_t dim);

/// Indices along the part's dimension of a shard with columns: those that no lower
/// rank holds.
std::vector<IndexRun> first_held(const Shard& shard);

/// The part, copied out of the whole.
Tensor take_part(const Tensor& whole, const Shards& shards);
/// Copies the part to its place in the whole.
void put_part(const Tensor& whole, const Tensor& part, const Shards& shards);

}  // namespace shardbook
