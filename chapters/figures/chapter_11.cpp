// DTensor: what a change of placement sends.

#include <fmt/format.h>

#include <cmath>

#include "chapters/11_dtensor/redistribute.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/shapes.h"

namespace shardbook::figures::page_11 {
namespace {

using dtensor::Placement;
using pictures::Figure;
using pictures::Point;

// The collective of a move of [n] over 4 ranks, and the share of n that a rank
// sends.
std::string cost_of(const Placement& from, const Placement& to) {
  const Shape shape = {8, 8}, mesh = {4};
  const auto calls = dtensor::calls_of({from}, {to}, shape, mesh, {0});
  if (calls.empty()) return "no message";
  std::string name = comm_op_name(calls[0].op);
  for (char& c : name) c = c == '_' ? '-' : c;
  const double quarters = dtensor::wire_elements(calls, mesh) / 16;
  return quarters == static_cast<int>(quarters)
             ? fmt::format("{}, {:g}/4 n", name, quarters)
             : fmt::format("{}, {:g}/16 n", name, 4 * quarters);
}

std::string moves() {
  const Placement r = dtensor::replicate(), p = dtensor::partial();
  const Placement s0 = dtensor::shard(0), s1 = dtensor::shard(1);
  Figure figure(
      "To cut costs nothing; to gather, to sum or to cut otherwise does\n"
      "A tensor of n bytes over 4 ranks; beside each arrow, what a rank "
      "sends",
      640);
  const double y = figure.add_row(250) + 10;
  const Point at_p{60, y + 110}, at_r{580, y + 110}, at_s0{320, y + 30},
      at_s1{320, y + 190};
  const auto move = [&](const Point& from, const Point& to, const Placement& a,
                        const Placement& b, double label_x, double label_y) {
    const double length = std::hypot(to.x - from.x, to.y - from.y);
    const double x = (to.x - from.x) / length, u = (to.y - from.y) / length;
    const std::string cost = cost_of(a, b);
    const std::string color =
        cost == "no message" ? pictures::kMuted : pictures::color_of("comm");
    // Beside the line between the two: the way back needs room
    const Point beside{-6 * u, 6 * x};
    arrow(figure, {from.x + 42 * x + beside.x, from.y + 26 * u + beside.y},
          {to.x - 42 * x + beside.x, to.y - 26 * u + beside.y}, color);
    figure.text(label_x, label_y, cost, Figure::Anchor::kMiddle, color);
  };
  move(at_p, at_s0, p, s0, 130, y + 56);
  move(at_p, at_s1, p, s1, 130, y + 172);
  move(at_p, at_r, p, r, 190, y + 108);
  move(at_s0, at_r, s0, r, 420, y + 88);
  move(at_r, at_s0, r, s0, 510, y + 50);
  move(at_s0, at_s1, s0, s1, 250, y + 140);
  move(at_s1, at_s0, s1, s0, 250, y + 156);
  move(at_s1, at_r, s1, r, 510, y + 186);
  move(at_r, at_s1, r, s1, 425, y + 136);
  const auto node = [&](const Point& at, const char* name, const char* text) {
    named_box(figure, {at.x - 34, at.y - 15, 68, 30},
              pictures::color_of("forward"), name);
    figure.text(at.x, at.y + 30, text, Figure::Anchor::kMiddle,
                pictures::kMuted);
  };
  node(at_p, "P(sum)", "terms");
  node(at_r, "R", "all of it");
  node({at_s0.x, at_s0.y}, "S(0)", "");
  node(at_s1, "S(1)", "columns");
  figure.text(at_s0.x, at_s0.y - 20, "rows", Figure::Anchor::kMiddle,
              pictures::kMuted);
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/11_dtensor/moves.svg", moves}};
}

}  // namespace shardbook::figures::page_11
