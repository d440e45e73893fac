// The cube: one rank's pieces, and the comparison with squares.

#include <fmt/format.h>

#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/ranks.h"
#include "chapters/figures/shapes.h"

namespace shardbook::figures::page_10 {
namespace {

using pictures::Figure;
using pictures::Point;

// Matrix [rows, columns] in parts, with one rank's own part and what it gathers
// (or sums).
void draw_parts(Figure& figure, const std::string& name,
                const std::string& below, const pictures::Box& at, int rows,
                int columns, const std::vector<std::pair<int, int>>& gathered,
                const std::pair<int, int>& own) {
  const double width = at.width / columns, height = at.height / rows;
  const auto part = [&](const std::pair<int, int>& place) {
    return pictures::Box{at.x + width * place.second,
                         at.y + height * place.first, width - 2, height - 2};
  };
  figure.text(at.x + at.width / 2, at.y - 8, name, Figure::Anchor::kMiddle);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) figure.box(part({i, j}), "empty");
  }
  for (const auto& place : gathered) figure.box(part(place), "comm");
  named_box(figure, part(own), pictures::kInk, "own");
  figure.text(at.x + at.width / 2, at.y + at.height + 16, below,
              Figure::Anchor::kMiddle, pictures::kMuted);
}

std::string cube() {
  constexpr int kSide = 2, kRank = 3;
  constexpr double kEdge = 84, kSlant = 40;
  const cube::Place me = cube::place_of(kRank, kSide);
  Figure figure(
      "Every matrix is stored once; a rank gathers along an edge of the cube\n"
      "Rank 3 multiplies X(1, 0) by W(0, 1). Dark: its own part; purple: its "
      "neighbour's.",
      640);
  const double top = figure.add_row(190) + 34;
  const auto at = [&](int i, int j, int k) {
    return Point{30 + kEdge * i + kSlant * j,
                 top + 112 - kEdge * k - 0.6 * kSlant * j};
  };
  for (int a = 0; a < 2; ++a) {
    for (int b = 0; b < 2; ++b) {
      figure.line({at(0, a, b), at(1, a, b)}, pictures::kMuted);
      figure.line({at(a, 0, b), at(a, 1, b)}, pictures::kMuted);
      figure.line({at(a, b, 0), at(a, b, 1)}, pictures::kMuted);
    }
  }
  const auto neighbour = [&](int di, int dj, int dk) {
    figure.line({at(me.i, me.j, me.k), at(me.i ^ di, me.j ^ dj, me.k ^ dk)},
                pictures::color_of("comm"), 4);
  };
  neighbour(1, 0, 0);
  neighbour(0, 1, 0);
  neighbour(0, 0, 1);
  for (int rank = 0; rank < 8; ++rank) {
    const cube::Place place = cube::place_of(rank, kSide);
    const Point p = at(place.i, place.j, place.k);
    named_box(figure, {p.x - 11, p.y - 11, 22, 22},
              rank == kRank ? pictures::kInk : pictures::kMuted,
              std::to_string(rank));
  }
  figure.text(at(0, 0, 0).x + kEdge / 2, at(0, 0, 0).y + 24, "i: W",
              Figure::Anchor::kMiddle, pictures::kMuted);
  figure.text(at(1, 0, 0).x + 40, at(1, 0, 0).y + 2, "j: X",
              Figure::Anchor::kStart, pictures::kMuted);
  figure.text(at(0, 0, 0).x - 30, at(0, 0, 0).y - kEdge / 2, "k: Y",
              Figure::Anchor::kStart, pictures::kMuted);

  // Rows (i, j) and columns k of X; rows (k, i) and columns j of W; rows (i, k)
  // and columns j of Y
  const int l = kSide, other_i = 1 - me.i, other_j = 1 - me.j,
            other_k = 1 - me.k;
  const double y = top + 8;
  draw_parts(figure, "X", "gathered along j", {250, y, 100, 112}, l * l, l,
             {{me.i * l + other_j, me.k}}, {me.i * l + me.j, me.k});
  draw_parts(figure, "W", "gathered along i", {385, y, 100, 112}, l * l, l,
             {{me.k * l + other_i, me.j}}, {me.k * l + me.i, me.j});
  draw_parts(figure, "Y", "summed along k", {520, y, 100, 112}, l * l, l,
             {{me.i * l + other_k, me.j}}, {me.i * l + me.k, me.j});
  return figure.svg("");
}

std::string comparison() {
  Options options;
  options.dtype = DType::kBF16;
  return cube::comparison_picture(cube::compare(options, {})).svg;
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/10_tensor_parallel_3d/cube.svg", cube},
          {"chapters/10_tensor_parallel_3d/comparison.svg", comparison}};
}

}  // namespace shardbook::figures::page_10
