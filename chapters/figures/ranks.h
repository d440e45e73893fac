#pragma once

#include <array>
#include <cstddef>

#include "chapters/pictures/palette.h"

namespace shardbook::figures {

/// A rank keeps its colour where ranks are the subject.
constexpr std::array<pictures::Stroke, 8> kRankStrokes = {
    pictures::kBlue, pictures::kOrange, pictures::kGreen, pictures::kPurple,
    pictures::kGold, pictures::kTeal,   pictures::kRed,   pictures::kSlate};

inline const char* rank_color(int rank) {
  return kRankStrokes[static_cast<std::size_t>(rank) % kRankStrokes.size()]
      .color;
}

}  // namespace shardbook::figures
