#include "chapters/pictures/units.h"

#include <fmt/format.h>

#include <cmath>

namespace shardbook::pictures {
namespace {

std::string with_name(const std::string& number, const Unit& unit) {
  return unit.name.empty() || number == "0" ? number : number + " " + unit.name;
}

}  // namespace

std::string text(double value, const Unit& unit) {
  const double number = value / unit.size;
  const double size = std::abs(number);
  if (size == 0) return "0";
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return with_name(fmt::format("{:.{}f}", number, decimals), unit);
}

std::string round_text(double value, const Unit& unit) {
  return with_name(fmt::format("{:.6g}", value / unit.size), unit);
}

Unit largest_below(double value, const std::vector<Unit>& units) {
  Unit chosen = units.front();
  for (const Unit& unit : units) {
    if (unit.size <= value) chosen = unit;
  }
  return chosen;
}

Unit seconds_unit(double largest_s) {
  return largest_below(largest_s,
                       {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}});
}

Unit bytes_unit(double largest_bytes) {
  return largest_below(largest_bytes, {{"B", 1},
                                       {"KiB", 1024},
                                       {"MiB", 1048576},
                                       {"GiB", 1073741824},
                                       {"TiB", 1099511627776}});
}

}  // namespace shardbook::pictures
