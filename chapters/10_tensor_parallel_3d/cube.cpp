#include "chapters/10_tensor_parallel_3d/cube.h"

#include "core/check.h"
#include "core/marks.h"

namespace shardbook::cube {

Layout swapped(Layout layout) {
  return layout == Layout::kStraight ? Layout::kSwapped : Layout::kStraight;
}

const char* layout_name(Layout layout) {
  return layout == Layout::kStraight ? "straight" : "swapped";
}

Tensor with_layout(const Tensor& x, Layout layout) {
  return set_mark(x, static_cast<int>(layout));
}

Layout layout_of(const Tensor& x) {
  const int mark = mark_of(x);
  SB_CHECK(mark == 1 || mark == 2, "tensor parallel 3d: an activation ",
           shape_text(x.shape()),
           " does not say how it lies on the cube; mark it with with_layout");
  return static_cast<Layout>(mark);
}

Place place_of(int rank, int l) {
  return {l, rank % l, rank / l % l, rank / (l * l)};
}

Topology cube_of(int l) { return Topology({"k", "j", "i"}, {l, l, l}); }

Cube cube_on(DeviceMesh& mesh) {
  Cube cube;
  cube.place = {mesh.size("i"), mesh.coordinate("i"), mesh.coordinate("j"),
                mesh.coordinate("k")};
  ProcessGroup &i = mesh.group("i"), &j = mesh.group("j"), &k = mesh.group("k");
  ProcessGroup &ij = mesh.group("i-j"), &ik = mesh.group("i-k");
  cube.straight = {&j, &k, &i, &ij, &ik};
  cube.swapped = {&k, &j, &i, &ik, &ij};
  return cube;
}

int side_of(int num_ranks, const std::string& option) {
  int l = 1;
  while ((l + 1) * (l + 1) * (l + 1) <= num_ranks) ++l;
  SB_CHECK(l * l * l == num_ranks, option, " ", num_ranks,
           ": the ranks form a cube; give ", l * l * l, " or ",
           (l + 1) * (l + 1) * (l + 1));
  return l;
}

Shards weight_part(const Place& place, Layout layout,
                   const std::vector<Columns>& columns) {
  return {{0, place.column_part(layout), place.l},
          {0, place.i, place.l},
          cut_columns(1, place.column_part(swapped(layout)), place.l, columns)};
}

Shards column_part(const Place& place, Layout layout, std::int64_t dim,
                   const std::vector<Columns>& columns) {
  return {cut_columns(dim, place.column_part(layout), place.l, columns)};
}

Shards table_part(const Place& place) {
  return {{0, place.j, place.l}, {0, place.i, place.l}, {1, place.k, place.l}};
}

Tensor own_rows(const Tensor& batch, const Cube& cube, Layout layout) {
  return summa::own_rows(batch, cube.place.block(layout));
}

Tensor own_block(const Tensor& x, const Cube& cube, Layout layout) {
  return with_layout(summa::own_block(x, cube.place.block(layout)), layout);
}

}  // namespace shardbook::cube
