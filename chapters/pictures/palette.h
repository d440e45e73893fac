#pragma once

// The colours of all pictures, as in chapters/table/report.css.

#include <array>
#include <cstddef>

namespace shardbook::pictures {

/// Of texts, and of lines to compare with.
constexpr const char* kInk = "#1c1e21";
/// Of axes.
constexpr const char* kMuted = "#555c64";
/// Of texts on boxes.
constexpr const char* kWhite = "#ffffff";
/// Of lines behind curves.
constexpr const char* kPale = "#d8dbdf";

/// A colour, and dashes that tell its line from the others in grey.
struct Stroke {
  const char* color = "";
  const char* dashes = "";
};
constexpr Stroke kBlue = {"#1f5594", ""};
constexpr Stroke kOrange = {"#c2570c", "8 3"};
constexpr Stroke kGreen = {"#1d5c38", "2 3"};
constexpr Stroke kPurple = {"#8a4bb0", "12 3 2 3"};
constexpr Stroke kGold = {"#9a7108", "5 5"};
constexpr Stroke kTeal = {"#11767c", "2 6"};
constexpr Stroke kRed = {"#a93558", "1 5"};
constexpr Stroke kSlate = {"#6a737c", "8 3 2 3"};
/// Of lines to compare with: formulas, one device.
constexpr Stroke kGray = {kMuted, "3 3"};
constexpr Stroke kBlack = {kInk, ""};

/// A rank keeps its colour where ranks are the subject.
constexpr std::array<Stroke, 8> kRankStrokes = {kBlue, kOrange, kGreen, kPurple,
                                                kGold, kTeal,   kRed,   kSlate};
inline const char* rank_color(int rank) {
  return kRankStrokes[static_cast<std::size_t>(rank) % kRankStrokes.size()]
      .color;
}

}  // namespace shardbook::pictures
