// The comparison as a table and as a plot.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"
#include "core/check.h"

namespace shardbook::cube {
namespace {

constexpr double kMiB = 1024 * 1024;

/// In the order of Kind.
struct KindStyle {
  Kind kind;
  const char *name, *color;
};
constexpr std::array<KindStyle, 4> kStyles = {
    KindStyle{Kind::k1D, "1D", "#777777"},
    KindStyle{Kind::k2D, "2D", "#1f77b4"},
    KindStyle{Kind::k2p5D, "2.5D", "#d62728"},
    KindStyle{Kind::k3D, "3D", "#2ca02c"}};

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
      "{} of h = {}{} in {}, forward and backward on {}; T tokens in {} "
      "sequences; per rank, * the least\n",
      layer.is_mlp ? "An MLP" : "A block", layer.h,
      layer.is_mlp ? "" : fmt::format(" with {} heads", layer.heads),
      dtype_name(all.dtype), all.cluster, layer.sequences);

  std::string titles = fmt::format("{:<17}{:>12}", "ranks", "weights, MiB");
  std::string sizes = fmt::format("{:>29}", "T =");
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
                  : fmt::format(", from T = {:.2f} h on {}",
                                lead.tokens / static_cast<double>(layer.h),
                                way_name(lead.way));
    }
    text += line + "\n";
  }
  return text;
}

// --- The plot ------------------------------------------------------------------

namespace {

std::string svg_text(double x, double y, const char* anchor,
                     const std::string& words, const char* color = "#333333") {
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" "
      "fill=\"{}\">{}</text>\n",
      x, y, anchor, color, words);
}

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

}  // namespace

std::string comparison_svg(const Comparison& all) {
  constexpr double kWidth = 200, kHeight = 260, kGap = 30;
  constexpr double kLeft = 80, kTop = 60, kBelow = 50;
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
  const auto y_of = [&](double mib) {
    return kTop + kHeight * (top - std::log2(mib)) / (top - bottom);
  };

  std::string body =
      svg_text(kLeft, 20, "start", "MiB sent per rank, over the ranks");
  double legend = kLeft + 260;
  for (const KindStyle& style : kStyles) {
    body += svg_text(legend, 20, "start", style.name, style.color);
    legend += 50;
  }
  for (std::size_t i = 0; i < plots; ++i) {
    const double left = kLeft + static_cast<double>(i) * (kWidth + kGap);
    const auto x_of = [&](int ranks) {
      return left + kWidth * (std::log2(ranks) - first) / (last - first);
    };
    body += svg_text(left + kWidth / 2, kTop - 10, "middle",
                     "T = " + tokens_text(layer.tokens_over_h[i]));
    for (double power = bottom; power <= top; ++power) {
      const double y = y_of(std::exp2(power));
      body += fmt::format(
          "<path d=\"M{:.1f} {:.1f}h{:.1f}\" stroke=\"#dddddd\"/>\n", left, y,
          kWidth);
      if (i == 0) {
        body += svg_text(left - 8, y + 4, "end",
                         fmt::format("{:g}", std::exp2(power)));
      }
    }
    for (const int ranks : layer.ranks) {
      body += svg_text(x_of(ranks), kTop + kHeight + 20, "middle",
                       std::to_string(ranks));
    }
    for (const KindStyle& style : kStyles) {
      std::string points, circles;
      for (const int ranks : layer.ranks) {
        const double mib = least_sent_mib(all, style.kind, ranks, i);
        if (std::isinf(mib)) continue;
        const double x = x_of(ranks), y = y_of(mib);
        points += fmt::format("{:.1f},{:.1f} ", x, y);
        circles += fmt::format(
            "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x, y,
            style.color);
      }
      body += fmt::format(
          "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" "
          "stroke-width=\"2\"/>\n{}",
          points, style.color, circles);
    }
  }
  const double width = kLeft + static_cast<double>(plots) * (kWidth + kGap);
  const double height = kTop + kHeight + kBelow;
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:g} {:g}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"{:g}\" height=\"{:g}\" fill=\"white\"/>\n{}</svg>\n",
      width, height, width, height, body);
}

void add_options(CommandLine& line, ProgramOptions& setup) {
  add_passes(line, setup.passes);
  line.add("--keep-gathered", &setup.keep_gathered,
           "keep gathered operands for backward");
  line.add_mode("--compare", &setup.compared,
                "print what one layer costs in 1D, 2D, 2.5D and 3D, and "
                "train nothing",
                {"block", "mlp", "none"});
  line.add("--picture", &setup.picture,
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
  std::ofstream file(picture);
  file << comparison_svg(all) << std::flush;
  SB_CHECK(file, "--picture ", picture, ": cannot be written");
  return 0;
}

}  // namespace shardbook::cube
