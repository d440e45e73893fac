// The cube: its surface, one rank's pieces, and the comparison with 1D and
// squares.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/figures/figures.h"

namespace shardbook::figures::page_10 {

// Lines between the corners of a cube that are `at` places of 0 and 1.
template <typename At>
void draw_edges(Figure& figure, const At& at, const std::string& dashes = "") {
  for (const int a : {0, 1}) {
    for (const int b : {0, 1}) {
      figure.line({at(0, a, b), at(1, a, b)}, kMuted, 1, dashes);
      figure.line({at(a, 0, b), at(a, 1, b)}, kMuted, 1, dashes);
      figure.line({at(a, b, 0), at(a, b, 1)}, kMuted, 1, dashes);
    }
  }
}

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
    const std::string d = path_of(points) + "Z";
    figure_.path(d, color);
    figure_.line(d, kInk);
  }
  void outline() {
    draw_edges(
        figure_, [this](double i, double j, double k) { return at(i, j, k); },
        "2 3");
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
    const char* shape = is_1d                         ? "a plate"
                        : way.kind == cube::Kind::k2D ? "a rod"
                                                      : "a cube";
    const double y = corner + kEdge;
    figure.text(x, y + 22, fmt::format("{}: {}", way_name(way), shape));
    figure.text(x, y + 40, fmt::format("touches {:.2f} matrices", touched));
    figure.text(x, y + 58,
                fmt::format("moves {:.0f}/{} of one", moved * kRanks, kRanks));
    figure.describe(fmt::format("{} touches {:.2f} matrices and moves {:.2f}",
                                way_name(way), touched, moved));
    x += kColumn;
  }
  figure.legend({std::string(kBlue.color) + ": X, at the right",
                 std::string(kOrange.color) + ": W, above",
                 std::string(kGreen.color) + ": Y, in front"});
  return figure.svg();
}

// A matrix in 4 x 2 parts, with one rank's own part and its neighbour's, which
// it gathers or sums.
void draw_parts(Figure& figure, const std::string& name,
                const std::string& below, const Point& at,
                const std::pair<int, int>& other,
                const std::pair<int, int>& own, const char* color) {
  constexpr double kWidth = 42, kHeight = 28;
  const auto part = [&](int row, int column) {
    return Box{at.x + kWidth * column, at.y + kHeight * row, kWidth - 2,
               kHeight - 2};
  };
  figure.middle(at.x + kWidth, at.y - 8, name);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) figure.box(part(i, j), "empty");
  }
  figure.box(part(other.first, other.second), color);
  figure.box(part(own.first, own.second), kInk, "own");
  figure.middle(at.x + kWidth, at.y + 4 * kHeight + 16, below, color);
}

std::string cube() {
  constexpr int kSide = 2, kRank = 3;
  constexpr double kEdge = 84, kSlant = 40;
  const auto [l, i, j, k] = cube::place_of(kRank, kSide);
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
  draw_edges(figure, at);
  figure.line({at(i, j, k), at(1 - i, j, k)}, kOrange.color, 5);
  figure.line({at(i, j, k), at(i, 1 - j, k)}, kBlue.color, 5);
  figure.line({at(i, j, k), at(i, j, 1 - k)}, kGreen.color, 5);
  for (int rank = 0; rank < 8; ++rank) {
    const cube::Place place = cube::place_of(rank, kSide);
    const Point p = at(place.i, place.j, place.k);
    figure.box({p.x - 11, p.y - 11, 22, 22}, rank == kRank ? kInk : kMuted,
               std::to_string(rank));
  }
  figure.middle(at(0, 0, 0).x + kEdge / 2, at(0, 0, 0).y + 22, "i",
                kOrange.color);
  figure.text(at(1, 0, 0).x + 28, at(1, 0, 0).y, "j", kBlue.color);
  figure.middle(at(0, 0, 0).x - 20, at(0, 0, 0).y - kEdge / 2, "k",
                kGreen.color);

  // Rows (i, j) and columns k of X; rows (k, i) and columns j of W; rows (i, k)
  // and columns j of Y
  const double y = top + 8;
  draw_parts(figure, "X", "gathered along j", {204, y}, {2 * i + 1 - j, k},
             {2 * i + j, k}, kBlue.color);
  draw_parts(figure, "W", "gathered along i", {310, y}, {2 * k + 1 - i, j},
             {2 * k + i, j}, kOrange.color);
  draw_parts(figure, "Y", "summed along k", {416, y}, {2 * i + 1 - k, j},
             {2 * i + k, j}, kGreen.color);
  return figure.svg();
}

// What a way sends, as a share of what 1D sends on as many ranks.
std::vector<Value> shares_of_1d(const cube::Comparison& all, cube::Kind kind,
                                int ranks) {
  const auto sent = [&](cube::Kind kind) {
    const auto found =
        std::ranges::find_if(all.ways, [&](const cube::Compared& each) {
          return each.way.ranks == ranks && each.way.kind == kind;
        });
    return found->costs;
  };
  const auto one_d = sent(cube::Kind::k1D), other = sent(kind);
  std::vector<Value> shares;
  for (std::size_t i = 0; i < one_d.size(); ++i) {
    shares.push_back({all.layer.tokens_over_h[i],
                      other[i].sent_bytes / one_d[i].sent_bytes});
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
  const std::vector<double> marks = {0.125, 0.25, 0.5, 1, 2, 4, 8};
  Plot plot(
      "From bs = 3h/(q² + q − 3) on, 3D sends less than 1D\n"
      "Vertical lines: this point on 64, 27 and 8 ranks",
      {34, 386, 250, 500},
      logarithmic("tokens over the width, bs/h", 1.0 / 12, 32.0 / 3, marks,
                  fraction),
      logarithmic("bytes sent, over those of 1D on as many ranks", 0.125, 8,
                  marks, fraction));
  plot.curve({{1.0 / 12, 1}, {32.0 / 3, 1}}, kGray, "1D");
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
  }
  plot.curve(shares_of_1d(all, cube::Kind::k2D, 64), kPurple, "2D on 64");
  return plot.svg();
}

std::string comparison() {
  Options options;
  options.dtype = DType::kBF16;
  return cube::comparison_picture(cube::compare(options, {})).svg;
}

std::vector<PageFigure> all() {
  return {{"chapters/10_tensor_parallel_3d/surfaces.svg", surfaces},
          {"chapters/10_tensor_parallel_3d/cube.svg", cube},
          {"chapters/10_tensor_parallel_3d/threshold.svg", threshold},
          {"chapters/10_tensor_parallel_3d/comparison.svg", comparison}};
}

}  // namespace shardbook::figures::page_10
