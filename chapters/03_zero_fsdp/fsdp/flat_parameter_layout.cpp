#include "chapters/03_zero_fsdp/fsdp/flat_parameter_layout.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::fsdp {

ShardLayout flat_layout(const std::vector<Shape>& shapes, int num_ranks) {
  ShardLayout layout;
  layout.num_ranks = num_ranks;
  layout.shapes = shapes;
  for (const Shape& shape : shapes) {
    layout.full_offset.push_back(layout.numel);
    layout.numel += shape_numel(shape);
  }
  layout.shard_numel = (layout.numel + num_ranks - 1) / num_ranks;
  return layout;
}

ShardLayout row_layout(const std::vector<Shape>& shapes, int num_ranks) {
  ShardLayout layout;
  layout.num_ranks = num_ranks;
  layout.per_parameter = true;
  layout.shapes = shapes;
  for (const Shape& shape : shapes) {
    SB_CHECK(!shape.empty(),
             "fully_shard: a parameter of shape [] has no dim "
             "0 to shard; give it shape [1]");
    const std::int64_t rows = (shape[0] + num_ranks - 1) / num_ranks;
    const std::int64_t row = shape[0] == 0 ? 0 : shape_numel(shape) / shape[0];
    layout.full_offset.push_back(num_ranks * layout.shard_numel);
    layout.chunk.push_back(rows * row);
    layout.numel += shape_numel(shape);
    layout.shard_numel += rows * row;
  }
  return layout;
}

Piece ShardLayout::piece(std::size_t parameter, int rank) const {
  const std::int64_t n = shape_numel(shapes[parameter]);
  Piece piece;
  if (per_parameter) {
    piece.begin = std::min(n, rank * chunk[parameter]);
    piece.end = std::min(n, (rank + 1) * chunk[parameter]);
    piece.shard_offset = full_offset[parameter] / num_ranks;
    return piece;
  }
  // Intersect [o, o + n) with this rank's [rS, (r + 1)S)
  const std::int64_t o = full_offset[parameter];
  const std::int64_t first = rank * shard_numel;
  const std::int64_t begin = std::clamp(first, o, o + n);
  const std::int64_t end = std::clamp(first + shard_numel, o, o + n);
  piece.begin = begin - o;
  piece.end = end - o;
  piece.shard_offset = piece.numel() == 0 ? 0 : begin - first;
  return piece;
}

}  // namespace shardbook::fsdp
