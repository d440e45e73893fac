// The cube: its surface, one rank's pieces, and the comparison with 1D and
// squares.

#include <fmt/format.h>

#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/figures/pages.h"

namespace shardbook::figures::page_10 {
namespace {

// A box of the product's cube of M x K x N multiplications, drawn from the front
// and above: rows i go down, columns j to the right, inner k into the picture.
class Solid {
 public:
  Solid(Figure& figure, const Point& corner, double edge)
      : figure_(figure), corner_(corner), edge_(edge) {}

  // Places and lengths are parts of the edge.
  Point at(double i, double j, double k) const {
    return {corner_.x + edge_ * (j + 0.42 * k),
            corner_.y + edge_ * (i - 0.36 * k)};
  }
  void face(const std::vector<Point>& points, const char* color) {
    figure_.colored_path(path_of(points) + "Z", color);
    std::vector<Point> closed = points;
    closed.push_back(points.front());
    figure_.line(closed, kInk);
  }
  void outline() {
    const auto edge = [this](const Point& from, const Point& to) {
      figure_.line({from, to}, kMuted, 1, "2 3");
    };
    for (const double a : {0.0, 1.0}) {
      for (const double b : {0.0, 1.0}) {
        edge(at(0, a, b), at(1, a, b));
        edge(at(a, 0, b), at(a, 1, b));
        edge(at(a, b, 0), at(a, b, 1));
      }
    }
  }
  // The front lower left corner is that of the whole; X at the right, W above,
  // Y in front.
  void part(double rows, double columns, double inner) {
    const double top = 1 - rows;
    face({at(top, columns, 0), at(top, columns, inner), at(1, columns, inner),
          at(1, columns, 0)},
         kBlue.color);
    face({at(top, 0, 0), at(top, columns, 0), at(top, columns, inner),
          at(top, 0, inner)},
         kOrange.color);
    face({at(top, 0, 0), at(top, columns, 0), at(1, columns, 0), at(1, 0, 0)},
         kGreen.color);
  }

 private:
  Figure& figure_;
  Point corner_;
  double edge_;
};

std::string surfaces() {
  constexpr int kRanks = 64;
  constexpr double kColumn = 170, kEdge = 96;
  Figure figure(
      "A cube of work touches less data than a plate or a rod\n"
      "One of 64 equal parts of Y = X W. It reads and writes its faces.",
      500);
  const double top = figure.add_row(226);
  const double corner = top + 52;
  double x = 4;
  std::string details;
  for (const cube::Way& way : cube::ways_for(kRanks)) {
    if (way.kind == cube::Kind::k2p5D) continue;
    const double part = 1.0 / way.side;
    const bool is_1d = way.kind == cube::Kind::k1D;
    const double rows = is_1d ? 1 : part;
    const double inner = way.kind == cube::Kind::k3D ? part : 1;
    Solid solid(figure, {x, corner}, kEdge);
    solid.outline();
    solid.part(rows, part, inner);
    // Faces, in matrices of M = K = N; of each the rank has 1/64
    const double touched = rows * inner + inner * part + rows * part;
    const double moved = touched - 3.0 / kRanks;
    const auto line = [&](double y, const std::string& text) {
      figure.text(x, corner + kEdge + y, text);
    };
    line(22, fmt::format("{}: {}", way_name(way),
                         is_1d                         ? "a plate"
                         : way.kind == cube::Kind::k2D ? "a rod"
                                                       : "a cube"));
    line(40, fmt::format("touches {:.2f} matrices", touched));
    line(58, fmt::format("moves {:.0f}/{} of one", moved * kRanks, kRanks));
    details += fmt::format("{} touches {:.2f} matrices and moves {:.2f}. ",
                           way_name(way), touched, moved);
    x += kColumn;
  }
  const double names = figure.add_row(22);
  x = 4;
  for (const auto& [stroke, name] :
       {std::pair(kBlue, "X, at the right"), std::pair(kOrange, "W, above"),
        std::pair(kGreen, "Y, in front")}) {
    figure.colored_box({x, names + 3, 11, 11}, stroke.color);
    figure.text(x + 17, names + 13, name);
    x += kColumn;
  }
  return figure.svg(details);
}

// Matrix [rows, columns] in parts, with one rank's own part and its
// neighbour's, which it gathers or sums.
void draw_parts(Figure& figure, const std::string& name,
                const std::string& below, const Box& at, int rows, int columns,
                const std::pair<int, int>& other,
                const std::pair<int, int>& own, const char* color) {
  const double width = at.width / columns, height = at.height / rows;
  const auto part = [&](const std::pair<int, int>& place) {
    return Box{at.x + width * place.second, at.y + height * place.first,
               width - 2, height - 2};
  };
  figure.middle(at.x + at.width / 2, at.y - 8, name);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) figure.box(part({i, j}), "empty");
  }
  figure.colored_box(part(other), color);
  named_box(figure, part(own), kInk, "own");
  figure.middle(at.x + at.width / 2, at.y + at.height + 16, below, color);
}

std::string cube() {
  constexpr int kSide = 2, kRank = 3;
  constexpr double kEdge = 84, kSlant = 40;
  const cube::Place me = cube::place_of(kRank, kSide);
  Figure figure(
      "One neighbour in each direction has the other half of a block\n"
      "Rank 3 is (i, j, k) = (1, 1, 0). In colour: the parts of its "
      "neighbours.",
      500);
  const double top = figure.add_row(190) + 34;
  const auto at = [&](int i, int j, int k) {
    return Point{34 + kEdge * i + kSlant * j,
                 top + 112 - kEdge * k - 0.6 * kSlant * j};
  };
  for (int a = 0; a < 2; ++a) {
    for (int b = 0; b < 2; ++b) {
      figure.line({at(0, a, b), at(1, a, b)}, kMuted);
      figure.line({at(a, 0, b), at(a, 1, b)}, kMuted);
      figure.line({at(a, b, 0), at(a, b, 1)}, kMuted);
    }
  }
  const auto neighbour = [&](int di, int dj, int dk, const char* color) {
    figure.line({at(me.i, me.j, me.k), at(me.i ^ di, me.j ^ dj, me.k ^ dk)},
                color, 5);
  };
  neighbour(1, 0, 0, kOrange.color);
  neighbour(0, 1, 0, kBlue.color);
  neighbour(0, 0, 1, kGreen.color);
  for (int rank = 0; rank < 8; ++rank) {
    const cube::Place place = cube::place_of(rank, kSide);
    const Point p = at(place.i, place.j, place.k);
    named_box(figure, {p.x - 11, p.y - 11, 22, 22},
              rank == kRank ? kInk : kMuted, std::to_string(rank));
  }
  figure.middle(at(0, 0, 0).x + kEdge / 2, at(0, 0, 0).y + 22, "i",
                kOrange.color);
  figure.text(at(1, 0, 0).x + 28, at(1, 0, 0).y, "j", kBlue.color);
  figure.middle(at(0, 0, 0).x - 20, at(0, 0, 0).y - kEdge / 2, "k",
                kGreen.color);

  // Rows (i, j) and columns k of X; rows (k, i) and columns j of W; rows (i, k)
  // and columns j of Y
  const int q = kSide, other_i = 1 - me.i, other_j = 1 - me.j,
            other_k = 1 - me.k;
  const double y = top + 8;
  draw_parts(figure, "X", "gathered along j", {204, y, 84, 112}, q * q, q,
             {me.i * q + other_j, me.k}, {me.i * q + me.j, me.k}, kBlue.color);
  draw_parts(figure, "W", "gathered along i", {310, y, 84, 112}, q * q, q,
             {me.k * q + other_i, me.j}, {me.k * q + me.i, me.j},
             kOrange.color);
  draw_parts(figure, "Y", "summed along k", {416, y, 84, 112}, q * q, q,
             {me.i * q + other_k, me.j}, {me.i * q + me.k, me.j}, kGreen.color);
  return figure.svg("");
}

// What a way sends, as a share of what 1D sends on as many ranks.
std::vector<Value> shares_of_1d(const cube::Comparison& all, cube::Kind kind,
                                int ranks) {
  const cube::Compared *one_d = nullptr, *other = nullptr;
  for (const cube::Compared& each : all.ways) {
    if (each.way.ranks != ranks) continue;
    if (each.way.kind == cube::Kind::k1D) one_d = &each;
    if (each.way.kind == kind) other = &each;
  }
  std::vector<Value> shares;
  for (std::size_t i = 0; i < all.layer.tokens_over_h.size(); ++i) {
    shares.push_back({all.layer.tokens_over_h[i],
                      other->costs[i].sent_bytes / one_d->costs[i].sent_bytes});
  }
  return shares;
}

std::string threshold() {
  Options options;
  options.cluster = "textbook";
  options.dtype = DType::kBF16;
  cube::ComparedLayer layer;
  // Sizes that 8, 27 and 64 ranks divide in all ways
  layer.h = 3456, layer.heads = 1728, layer.sequences = 288;
  layer.ranks = {8, 27, 64};
  layer.tokens_over_h.clear();
  for (double x = 1.0 / 12; x <= 16; x *= 2) layer.tokens_over_h.push_back(x);
  const cube::Comparison all = cube::compare(options, layer);
  Figure figure(
      "From bs = 3h/(q² + q − 3) on, 3D sends less than 1D\n"
      "Vertical lines: this point on 64, 27 and 8 ranks",
      500);
  const auto text = [](double value) {
    return value < 1 ? fmt::format("1/{:.0f}", 1 / value)
                     : fmt::format("{:.0f}", value);
  };
  const std::vector<double> marks = {0.125, 0.25, 0.5, 1, 2, 4, 8};
  Plot plot(figure, PlotSize{34, 386, 250},
            logarithmic("tokens over the width, bs/h", 1.0 / 12, 32.0 / 3,
                        marks, text),
            logarithmic("bytes sent, over those of 1D on as many ranks", 0.125,
                        8, marks, text));
  plot.curve({{1.0 / 12, 1}, {32.0 / 3, 1}}, kGray, "1D");
  std::string details;
  struct Case {
    int side;
    Stroke stroke;
  };
  for (const Case& each : {Case{2, kBlue}, {3, kOrange}, {4, kGreen}}) {
    const int ranks = each.side * each.side * each.side;
    const double point = 3.0 / (each.side * each.side + each.side - 3);
    const auto shares = shares_of_1d(all, cube::Kind::k3D, ranks);
    plot.mark(point, each.stroke, fmt::format("{:.2f}", point));
    plot.curve(shares, each.stroke, fmt::format("3D on {}", ranks));
    details += fmt::format("3D on {} ranks: from {:.2f} to {:.2f}. ", ranks,
                           shares.front().y, shares.back().y);
  }
  plot.curve(shares_of_1d(all, cube::Kind::k2D, 64), kPurple, "2D on 64");
  return plot.svg(details);
}

std::string comparison() {
  Options options;
  options.dtype = DType::kBF16;
  return cube::comparison_picture(cube::compare(options, {})).svg;
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/10_tensor_parallel_3d/surfaces.svg", surfaces},
          {"chapters/10_tensor_parallel_3d/cube.svg", cube},
          {"chapters/10_tensor_parallel_3d/threshold.svg", threshold},
          {"chapters/10_tensor_parallel_3d/comparison.svg", comparison}};
}

}  // namespace shardbook::figures::page_10
