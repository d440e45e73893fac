#pragma once

// Counts in the text of messages and reports.

#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>

namespace shardbook {

/// The number and its noun: "1 step", "2 steps", "3 micro-batches". `noun` is
/// one whose plural ends in s, or in es after ch, s and x.
template <typename Count,
          typename = std::enable_if_t<std::is_integral_v<Count>>>
std::string how_many(Count count, const std::string& noun) {
  const std::string text = std::to_string(count) + " " + noun;
  if (count == 1) return text;
  const char last = noun.empty() ? ' ' : noun.back();
  const bool hisses =
      last == 's' || last == 'x' ||
      (noun.size() > 1 && noun.compare(noun.size() - 2, 2, "ch") == 0);
  return text + (hisses ? "es" : "s");
}

/// "1,234": a count from 0 up.
inline std::string with_commas(double count) {
  std::string text = std::to_string(std::nearbyint(count));
  text.resize(text.find('.'));
  for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text;
}

}  // namespace shardbook
