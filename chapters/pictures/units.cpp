#include "chapters/pictures/units.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace shardbook::pictures {
namespace {

std::string with_name(const std::string& number, const Unit& unit) {
  return unit.name.empty() || number == "0" ? number : number + " " + unit.name;
}

std::string with_unit(double value, double step,
                      const std::array<const char*, 6>& units) {
  std::size_t unit = 0;
  // 1000 KiB reads better as 1.0 MiB, and never needs a fourth digit.
  while (value >= 999.5 && unit + 1 < units.size()) {
    value /= step;
    ++unit;
  }
  const int decimals = unit == 0 || value >= 99.95 ? 0 : 1;
  return fmt::format("{:.{}f} {}", value, decimals, units[unit]);
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
                       {{"ns", 1e-9}, {"us", 1e-6}, kMilliseconds, {"s", 1}});
}

Unit bytes_unit(double largest_bytes) {
  return largest_below(largest_bytes, {{"B", 1},
                                       {"KiB", 1024},
                                       {"MiB", 1048576},
                                       {"GiB", 1073741824},
                                       {"TiB", 1099511627776}});
}

std::string format_bytes(double bytes) {
  return with_unit(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
}

std::string format_decimal_bytes(double bytes) {
  return with_unit(bytes, 1000, {"B", "KB", "MB", "GB", "TB", "PB"});
}

}  // namespace shardbook::pictures
