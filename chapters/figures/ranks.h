#pragma once

#include <array>
#include <cstddef>

namespace shardbook::figures {

/// A rank keeps its colour where ranks are the subject.
constexpr std::array<const char*, 8> kRankColors = {
    "#1f5594", "#c2570c", "#1d5c38", "#8a4bb0",
    "#9a7108", "#11767c", "#a93558", "#6a737c"};

inline const char* rank_color(int rank) {
  return kRankColors[static_cast<std::size_t>(rank) % kRankColors.size()];
}

}  // namespace shardbook::figures
