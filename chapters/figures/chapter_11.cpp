// DTensor: what a change of placement sends, the parts of a matrix on a mesh,
// and whether tokens or weights should move.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <map>

#include "chapters/11_dtensor/dtensor_strategy.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/11_dtensor/redistribute.h"
#include "chapters/common/models/models.h"
#include "chapters/figures/figures.h"

namespace shardbook::figures::page_11 {

using dtensor::Placement;

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
      "To cut is free; to gather, to sum or to cut anew is not\n"
      "A tensor of n bytes over 4 ranks; at each arrow, what a rank sends",
      500);
  const double y = figure.add_row(236) + 10;
  const Point at_p{46, y + 108}, at_r{454, y + 108}, at_s0{250, y + 30},
      at_s1{250, y + 186};
  const auto move = [&](const Point& from, const Point& to, const Placement& a,
                        const Placement& b, double label_x, double label_y) {
    const double length = std::hypot(to.x - from.x, to.y - from.y);
    const double x = (to.x - from.x) / length, u = (to.y - from.y) / length;
    const std::string cost = cost_of(a, b);
    const std::string color = cost == "no message" ? kMuted : "comm";
    // Beside the line between the two: the way back needs room
    const Point beside{-6 * u, 6 * x};
    figure.arrow({from.x + 42 * x + beside.x, from.y + 26 * u + beside.y},
                 {to.x - 42 * x + beside.x, to.y - 26 * u + beside.y}, color);
    if (label_x > 0) figure.middle(label_x, label_y, cost, color);
  };
  move(at_p, at_s0, p, s0, 86, y + 52);
  move(at_p, at_s1, p, s1, 86, y + 172);
  move(at_p, at_r, p, r, 160, y + 107);
  move(at_s0, at_r, s0, r, 332, y + 94);
  move(at_r, at_s0, r, s0, 388, y + 50);
  move(at_s0, at_s1, s0, s1, 180, y + 136);
  move(at_s1, at_s0, s1, s0, 0, 0);  // as long as the way there
  move(at_s1, at_r, s1, r, 414, y + 180);
  move(at_r, at_s1, r, s1, 320, y + 136);
  const auto node = [&](const Point& at, const char* name, const char* text,
                        double text_y) {
    figure.box({at.x - 34, at.y - 15, 68, 30}, "forward", name);
    figure.middle(at.x, at.y + text_y, text, kMuted);
  };
  node(at_p, "P(sum)", "terms", 30);
  node(at_r, "R", "all of it", 30);
  node(at_s0, "S(0)", "rows", -20);
  node(at_s1, "S(1)", "columns", 30);
  return figure.svg();
}

// Who holds which part of a matrix on a mesh of 2 x 2 ranks.
std::string mesh_parts() {
  const Shape axes = {2, 2};
  const std::vector<dtensor::Placements> all = {
      {dtensor::shard(0), dtensor::replicate()},
      {dtensor::replicate(), dtensor::shard(1)},
      {dtensor::shard(0), dtensor::shard(1)},
      {dtensor::shard(0), dtensor::shard(0)}};
  const std::vector<const char*> texts = {
      "dp cuts rows, tp copies", "dp copies, tp cuts columns",
      "dp cuts rows, tp columns", "both cut rows, dp first"};
  constexpr double kSide = 88, kColumn = 170, kRow = 148;
  Figure figure(
      "A placement per axis says which part of a matrix a rank has\n"
      "In brackets: the placements on dp and tp. Grey: two ranks have the part",
      500);
  const double top = figure.add_row(2 * kRow);

  std::string details;
  // The mesh itself
  figure.middle(60, top + 16, "the mesh");
  for (int rank = 0; rank < 4; ++rank) {
    const double x = 30 + 34.0 * (rank % 2), y = top + 44 + 34.0 * (rank / 2);
    figure.box({x, y, 28, 28}, rank_color(rank), std::to_string(rank));
  }
  figure.arrow({30, top + 34}, {92, top + 34}, kMuted);
  figure.middle(104, top + 38, "tp", kMuted);
  figure.arrow({22, top + 44}, {22, top + 106}, kMuted);
  figure.middle(22, top + 122, "dp", kMuted);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double x = 156 + kColumn * (i % 2) + 41;
    const double y = top + kRow * (i / 2);
    const dtensor::Held held = dtensor::held_by("", {4, 4}, all[i], axes);
    const std::string name = dtensor::text(all[i]);
    figure.middle(x + kSide / 2, y + 16, name);
    figure.middle(x + kSide / 2, y + 32, texts[i], kMuted);
    details += name + ": ";
    // The ranks that have the same part share its box
    std::map<std::vector<std::int64_t>, std::vector<int>> parts;
    for (int rank = 0; rank < 4; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      const IndexRun &rows = held.rows_of[r][0],
                     &columns = held.columns_of[r][0];
      parts[{rows.begin, rows.count, columns.begin, columns.count}].push_back(
          rank);
    }
    for (const auto& [part, ranks] : parts) {
      constexpr double kUnit = kSide / 4;
      const Box at = {x + kUnit * part[2], y + 42 + kUnit * part[0],
                      kUnit * part[3], kUnit * part[1]};
      // What several ranks have is grey
      const bool is_one = ranks.size() == 1;
      figure.box({at.x + 1, at.y + 1, at.width - 2, at.height - 2},
                 is_one ? rank_color(ranks[0]) : "empty",
                 fmt::format("{}", fmt::join(ranks, ", ")),
                 is_one ? kWhite : kInk);
      details += fmt::format("rows {} to {}, columns {} to {} on ranks {}. ",
                             part[0], part[0] + part[1] - 1, part[2],
                             part[2] + part[3] - 1, fmt::join(ranks, " and "));
    }
  }
  return figure.svg(details);
}

std::string threshold() {
  const ModelConfig gpt = ModelConfig::read("gpt-1.3b");
  const double h = gpt.n_embd;
  const double most = 3 * h + gpt.vocab_size / (2.0 * gpt.n_layer);
  const auto exposed = [](const std::string& mesh) {
    return sweep("11_dtensor --mesh " + mesh +
                     on_shapes("textbook", 8, "gpt-1.3b", 8, 64),
                 "--seq", {64, 128, 256, 512, 768, 1024, 1536, 2048}, exposed_s,
                 8);
  };
  const auto tokens = exposed("1x8"), weights = exposed("8x1");
  Plot plot(
      "With few tokens, move the tokens; with many, the weights\n"
      "GPT 1.3B on 8 ranks of textbook, f32. Vertical line: Bs = 3h + V/(2L)",
      {46, 330, 220, 500},
      marked("tokens of a step, Bs", {0, 4096, 8192, 12288, 16384}),
      {"exposed communication of a step", 0, 0.25, kMilliseconds});
  plot.mark(most, kGray, fmt::format("{:.0f}", most));
  plot.dotted_curve(tokens, kBlue, "tp: tokens move");
  plot.dotted_curve(weights, kOrange, "fsdp: weights move");
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/11_dtensor/moves.svg", moves},
          {"chapters/11_dtensor/mesh.svg", mesh_parts},
          {"chapters/11_dtensor/threshold.svg", threshold}};
}

}  // namespace shardbook::figures::page_11
