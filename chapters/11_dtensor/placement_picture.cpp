#include "chapters/11_dtensor/placement_picture.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "chapters/pictures/figure.h"
#include "core/check.h"

namespace shardbook::dtensor {
namespace {

/// A matrix cut where any rank's part begins or ends.
struct Grid {
  std::vector<std::int64_t> rows, columns;      // borders
  std::vector<std::vector<std::string>> cells;  // "0 1": the ranks that hold it
};

std::vector<std::int64_t> borders(
    const std::vector<std::vector<IndexRun>>& runs_of, std::int64_t end) {
  std::set<std::int64_t> at = {0, end};
  for (const auto& runs : runs_of) {
    for (const IndexRun& run : runs) {
      if (run.count == 0) continue;
      at.insert(run.begin);
      at.insert(run.begin + run.count);
    }
  }
  return {at.begin(), at.end()};
}

bool has(const std::vector<IndexRun>& runs, std::int64_t index) {
  return std::any_of(runs.begin(), runs.end(), [index](const IndexRun& run) {
    return run.begin <= index && index < run.begin + run.count;
  });
}

Grid grid_of(const Held& held) {
  Grid grid{borders(held.rows_of, held.rows),
            borders(held.columns_of, held.columns),
            {}};
  for (std::size_t i = 0; i + 1 < grid.rows.size(); ++i) {
    grid.cells.emplace_back();
    for (std::size_t j = 0; j + 1 < grid.columns.size(); ++j) {
      std::string ranks;
      for (std::size_t r = 0; r < held.rows_of.size(); ++r) {
        if (has(held.rows_of[r], grid.rows[i]) &&
            has(held.columns_of[r], grid.columns[j])) {
          ranks += (ranks.empty() ? "" : " ") + std::to_string(r);
        }
      }
      grid.cells.back().push_back(ranks);
    }
  }
  return grid;
}

}  // namespace

Held held_by(const std::string& name, const Shape& shape, int num_ranks,
             const std::function<Shards(int rank)>& shards) {
  SB_CHECK(shape.size() == 1 || shape.size() == 2, "picture of ", name, " ",
           shape_text(shape), ": give a vector or a matrix");
  Held held;
  held.title = name + " " + shape_text(shape);
  held.rows = shape[0];
  held.columns = shape.size() > 1 ? shape[1] : 1;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Shards mine = shards(rank);
    held.rows_of.push_back(runs_of(mine, shape, 0));
    held.columns_of.push_back(shape.size() > 1 ? runs_of(mine, shape, 1)
                                               : std::vector<IndexRun>{{0, 1}});
  }
  return held;
}

Held held_by(const std::string& name, const Shape& shape,
             const Placements& placements, const Shape& mesh) {
  const auto shards_of = [&](int rank) {
    Shards shards;
    std::int64_t inner = shape_numel(mesh);
    Shape left = shape;
    for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
      inner /= mesh[axis];
      if (!placements[axis].is_shard()) continue;
      const std::int64_t at = rank / inner % mesh[axis];
      const std::int64_t dim = placements[axis].dim;
      std::int64_t& length = left[static_cast<std::size_t>(dim)];
      shards.push_back({dim, at, mesh[axis], 1, length});
      length = ceil_part(length, mesh[axis], at).size;
    }
    return shards;
  };
  const auto ranks = static_cast<int>(shape_numel(mesh));
  Held held = held_by(name, shape, ranks, shards_of);
  held.title += "  " + text(placements);
  return held;
}

std::string picture_text(const std::vector<Held>& all) {
  std::ostringstream out;
  for (const Held& held : all) {
    const Grid grid = grid_of(held);
    std::size_t width = 1;
    for (const auto& row : grid.cells) {
      for (const std::string& cell : row) width = std::max(width, cell.size());
    }
    std::string line = "+";
    for (std::size_t j = 0; j + 1 < grid.columns.size(); ++j) {
      line += std::string(width + 2, '-') + "+";
    }
    out << held.title << "\n" << line << "\n";
    for (const auto& row : grid.cells) {
      out << "|";
      for (const std::string& cell : row) {
        out << " " << cell << std::string(width - cell.size(), ' ') << " |";
      }
      out << "\n" << line << "\n";
    }
  }
  return out.str();
}

std::string picture_svg(const std::string& title,
                        const std::vector<Held>& all) {
  constexpr double kWidth = 420, kRow = 24;
  using pictures::Figure;
  Figure figure(title, kWidth);
  std::map<std::string, std::size_t> colors;
  std::string details;
  for (const Held& held : all) {
    const Grid grid = grid_of(held);
    figure.heading(held.title);
    details += held.title + ", ranks of each block:";
    const double unit = kWidth / static_cast<double>(held.columns);
    for (std::size_t i = 0; i < grid.cells.size(); ++i) {
      const double y = figure.add_row(kRow);
      for (std::size_t j = 0; j < grid.cells[i].size(); ++j) {
        const std::string& ranks = grid.cells[i][j];
        const std::size_t color =
            colors.emplace(ranks, colors.size()).first->second;
        const double x = unit * static_cast<double>(grid.columns[j]);
        const double width =
            unit * static_cast<double>(grid.columns[j + 1] - grid.columns[j]);
        // Neighbours differ in lightness, too.
        figure.framed_box({x, y, width, kRow},
                          "hsl(" + std::to_string(color * 137 % 360) + ",60%," +
                              std::to_string(92 - color % 3 * 7) + "%)",
                          pictures::kInk);
        figure.text(x + width / 2, y + 16, ranks, Figure::Anchor::kMiddle);
        details += (j > 0 ? " | " : i > 0 ? " / " : " ") + ranks;
      }
    }
    figure.add_row(8);
    details += ". ";
  }
  return figure.svg(details);
}

}  // namespace shardbook::dtensor
