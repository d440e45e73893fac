// The comparison as a table and as a plot.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "chapters/pictures/figure.h"
#include "core/check.h"
#include "core/text_file.h"

namespace shardbook::cube {
namespace {

constexpr double kMiB = 1024 * 1024;

/// In the order of Kind.
struct KindStyle {
  Kind kind;
  const char *name, *color, *dashes;
};
constexpr std::array<KindStyle, 4> kStyles = {
    KindStyle{Kind::k1D, "1D", "#555c64", ""},
    KindStyle{Kind::k2D, "2D", "#1f5594", "8 3"},
    KindStyle{Kind::k2p5D, "2.5D", "#c2570c", "2 3"},
    KindStyle{Kind::k3D, "3D", "#1d5c38", "12 3 2 3"}};

const KindStyle& style_of(Kind kind) {
  return kStyles[static_cast<std::size_t>(kind)];
}

/// "h/4", "h", "16h".
std::string tokens_text(double share) {
  if (share == 1) return "h";
  return share < 1 ? fmt::format("h/{:g}", 1 / share)
                   : fmt::format("{:g}h", share);
}

/// One number of a rank, as the table has it.
struct Column {
  const char* title;
  double Cost::*value;
  double unit;
  int digits;
};

constexpr std::array<Column, 3> kColumns = {
    Column{"kept, MiB", &Cost::kept_bytes, kMiB, 1},
    Column{"sent, MiB", &Cost::sent_bytes, kMiB, 1},
    Column{"time, ms", &Cost::time_s, 1e-3, 2}};

/// True if no other way on as many ranks has less, for tokens number `i`.
bool is_least(const Comparison& all, const Compared& one, std::size_t i,
              double Cost::*value) {
  return std::none_of(
      all.ways.begin(), all.ways.end(), [&](const Compared& other) {
        return other.way.ranks == one.way.ranks &&
               other.costs[i].*value < one.costs[i].*value * (1 - 1e-9);
      });
}

/// The line, without spaces at its end.
std::string ended(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

}  // namespace

std::string way_name(const Way& way) {
  const std::string name = style_of(way.kind).name;
  return way.kind == Kind::k2p5D ? fmt::format("{} d={}", name, way.depth)
                                 : name;
}

std::string comparison_text(const Comparison& all) {
  const ComparedLayer& layer = all.layer;
  const std::vector<double>& tokens = layer.tokens_over_h;
  std::string text = fmt::format(
      "{} of h = {}{} in {}, forward and backward on {}; bs tokens in {} "
      "sequences; per rank, * the least\n",
      layer.is_mlp ? "An MLP" : "A block", layer.h,
      layer.is_mlp ? "" : fmt::format(" with {} heads", layer.heads),
      dtype_name(all.dtype), all.cluster, layer.sequences);

  std::string titles = fmt::format("{:<17}{:>12}", "ranks", "weights, MiB");
  std::string sizes = fmt::format("{:>29}", "bs =");
  for (const Column& column : kColumns) {
    titles +=
        fmt::format("{:>9}{:<{}}", "", column.title, 9 * (tokens.size() - 1));
    for (const double share : tokens) {
      sizes += fmt::format("{:>7}  ", tokens_text(share));
    }
  }
  text += ended(titles) + ended(sizes);

  for (const Compared& one : all.ways) {
    std::string line =
        fmt::format("{:>5}  {:<10}{:>12.1f}", one.way.ranks, way_name(one.way),
                    one.costs.front().weight_bytes / kMiB);
    for (const Column& column : kColumns) {
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        line += fmt::format(
            "{:>7.{}f}{}", one.costs[i].*column.value / column.unit,
            column.digits, is_least(all, one, i, column.value) ? " *" : "  ");
      }
    }
    text += ended(line);
  }

  text += "sends the least\n";
  for (const int ranks : layer.ranks) {
    std::string line;
    for (const Lead& lead : leads(all, ranks)) {
      line += line.empty()
                  ? fmt::format("{:>5}  {}", ranks, way_name(lead.way))
                  : fmt::format(", from bs = {:.2f} h on {}",
                                lead.tokens / static_cast<double>(layer.h),
                                way_name(lead.way));
    }
    text += line + "\n";
  }
  return text;
}

// --- The plot ------------------------------------------------------------------

namespace {

/// The least MiB that a kind sends; infinite without such ranks.
double least_sent_mib(const Comparison& all, Kind kind, int ranks,
                      std::size_t i) {
  double least = std::numeric_limits<double>::infinity();
  for (const Compared& one : all.ways) {
    if (one.way.kind == kind && one.way.ranks == ranks) {
      least = std::min(least, one.costs[i].sent_bytes / kMiB);
    }
  }
  return least;
}

/// "On 64 ranks 1D sends the least for bs = h/4, 3D for bs = 2h"
std::string plot_title(const Comparison& all) {
  const int ranks = all.layer.ranks.back();
  std::string title = fmt::format("On {} ranks", ranks), before;
  for (std::size_t i = 0; i < all.layer.tokens_over_h.size(); ++i) {
    std::string least;
    for (const Compared& one : all.ways) {
      if (one.way.ranks == ranks && is_least(all, one, i, &Cost::sent_bytes)) {
        least = style_of(one.way.kind).name;
      }
    }
    const std::string tokens =
        "bs = " + tokens_text(all.layer.tokens_over_h[i]);
    title += least == before ? fmt::format(" and {}", tokens)
             : i == 0 ? fmt::format(" {} sends the least for {}", least, tokens)
                      : fmt::format(", {} for {}", least, tokens);
    before = least;
  }
  return title;
}

}  // namespace

pictures::Picture comparison_picture(const Comparison& all) {
  constexpr double kWidth = 112, kHeight = 250, kGap = 40, kLeft = 44;
  using pictures::Figure;
  const ComparedLayer& layer = all.layer;
  const std::size_t plots = layer.tokens_over_h.size();
  double lowest = std::numeric_limits<double>::infinity(), highest = 0;
  for (const Compared& one : all.ways) {
    for (const Cost& cost : one.costs) {
      lowest = std::min(lowest, cost.sent_bytes / kMiB);
      highest = std::max(highest, cost.sent_bytes / kMiB);
    }
  }
  // Each step up, and each to the right, is a factor of 2
  const double bottom = std::floor(std::log2(lowest));
  const double top = std::ceil(std::log2(highest));
  const double first = std::log2(layer.ranks.front());
  const double last = std::log2(layer.ranks.back());

  Figure figure(plot_title(all) +
                    "\nMiB sent per rank, over the number of ranks; both axes "
                    "are logarithmic",
                kLeft + static_cast<double>(plots) * (kWidth + kGap) + 20);
  const double titles = figure.add_row(24) + 14;
  const double y0 = figure.add_row(kHeight + 4);
  const double names = figure.add_row(22) + 18;
  const auto y_of = [&](double mib) {
    return y0 + kHeight * (top - std::log2(mib)) / (top - bottom);
  };
  figure.text(0, titles, "MiB", Figure::Anchor::kStart, pictures::kMuted);
  figure.text(0, names, "ranks", Figure::Anchor::kStart, pictures::kMuted);
  std::string details;
  for (std::size_t i = 0; i < plots; ++i) {
    const double left = kLeft + static_cast<double>(i) * (kWidth + kGap);
    const auto x_of = [&](int ranks) {
      return left + kWidth * (std::log2(ranks) - first) / (last - first);
    };
    const std::string tokens = "bs = " + tokens_text(layer.tokens_over_h[i]);
    figure.text(left + kWidth / 2, titles, tokens, Figure::Anchor::kMiddle);
    for (double power = bottom; power <= top; ++power) {
      const double y = y_of(std::exp2(power));
      figure.line({{left, y}, {left + kWidth, y}}, "#d8dbdf");
      if (i > 0) continue;
      figure.text(left - 8, y + 4, fmt::format("{:g}", std::exp2(power)),
                  Figure::Anchor::kEnd, pictures::kMuted);
    }
    for (const int ranks : layer.ranks) {
      figure.text(x_of(ranks), names, std::to_string(ranks),
                  Figure::Anchor::kMiddle, pictures::kMuted);
    }
    details += tokens + ":";
    std::vector<Figure::Label> labels;
    for (const KindStyle& style : kStyles) {
      std::vector<pictures::Point> points;
      double mib = 0;
      for (const int ranks : layer.ranks) {
        const double least = least_sent_mib(all, style.kind, ranks, i);
        if (std::isinf(least)) continue;
        mib = least;
        points.push_back({x_of(ranks), y_of(mib)});
        figure.dot(points.back(), style.color);
      }
      if (points.empty()) continue;
      figure.line(points, style.color, 2, style.dashes);
      labels.push_back({points.back().y, style.name, style.color});
      details += fmt::format(" {} ends at {:.1f} MiB.", style.name, mib);
    }
    figure.labels(left + kWidth + 5, labels);
    details += " ";
  }
  return {"MiB sent per rank over the number of ranks", figure.svg(details),
          ""};
}

void add_options(CommandLine& line, ProgramOptions& setup) {
  add_passes(line, setup.passes);
  line.add({"--keep-gathered", may_differ::kPlace}, &setup.keep_gathered,
           "keep gathered operands for backward");
  line.add_mode({"--compare", may_differ::kOutput}, &setup.compared,
                "print what one layer costs in 1D, 2D, 2.5D and 3D, and "
                "train nothing",
                {"block", "mlp", "none"});
  line.add({"--picture", may_differ::kOutput}, &setup.picture,
           "with --compare: a file for the plot of the bytes sent, as SVG");
  line.after_parse([&setup] {
    SB_CHECK(setup.picture.empty() || setup.compared != "none", "--picture ",
             setup.picture, ": it shows what --compare counts; give both");
  });
}

int show_comparison(const Options& options, const std::string& layer,
                    const std::string& picture) {
  ComparedLayer compared;
  compared.is_mlp = layer == "mlp";
  const Comparison all = compare(options, compared);
  fmt::print("{}", comparison_text(all));
  if (picture.empty()) return 0;
  write_text_file(picture, comparison_picture(all).svg,
                  "--picture " + picture + ": this file");
  return 0;
}

}  // namespace shardbook::cube
