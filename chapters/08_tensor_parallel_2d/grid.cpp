#include "chapters/08_tensor_parallel_2d/grid.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace shardbook::summa {

Topology square(int q) { return Topology({"col", "row"}, {q, q}); }

Grid grid_of(DeviceMesh& mesh) {
  Grid grid;
  grid.row = &mesh.group("row");
  grid.col = &mesh.group("col");
  grid.batch = grid.col;
  if (mesh.topology().has_axis("dep")) {
    grid.depth = &mesh.group("dep");
    grid.batch = &mesh.group("dep-col");
  }
  return grid;
}

int side_of(int num_ranks, int depth, const std::string& option) {
  const int each = std::max(1, num_ranks / depth);
  const int q = std::max(
      1, static_cast<int>(std::lround(std::floor(std::sqrt(each + 0.5)))));
  SB_CHECK(depth * q * q == num_ranks, option, " ", num_ranks,
           depth == 1 ? ": the ranks form a square"
                      : ", --depth " + std::to_string(depth) +
                            ": the ranks form squares, one above the other",
           "; give ", depth * q * q, " or ", depth * (q + 1) * (q + 1));
  return q;
}

Place place_of(int rank, int q) { return {q, rank / q % q, rank % q}; }

Shards matrix_part(const Place& place, const std::vector<Columns>& columns) {
  return {{0, place.i, place.q}, cut_columns(1, place.j, place.q, columns)};
}

Shards vector_part(const Place& place, std::int64_t dim,
                   const std::vector<Columns>& columns) {
  return {cut_columns(dim, place.j, place.q, columns), {dim, place.i, place.q}};
}

namespace {

/// Part `index` of `count` of one dimension.
Tensor part_of(const Tensor& x, std::int64_t dim, int index, int count) {
  SB_CHECK(x.size(dim) % count == 0, "tensor parallel: dim ", dim, " of shape ",
           shape_text(x.shape()), " does not divide into ", count,
           " equal parts; give ", x.size(dim) / count * count + count);
  const std::int64_t own = x.size(dim) / count;
  return slice(x, dim, index * own, (index + 1) * own);
}

}  // namespace

Tensor own_rows(const Tensor& batch, const BlockPlace& at) {
  return part_of(batch, 0, at.row, at.rows);
}

Tensor own_block(const Tensor& x, const BlockPlace& at) {
  return part_of(own_rows(x, at), x.ndim() - 1, at.column, at.columns);
}

}  // namespace shardbook::summa
