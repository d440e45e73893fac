#include "chapters/pictures/bytes.h"

#include <fmt/format.h>

#include <array>

namespace shardbook::pictures {
namespace {

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

std::string format_bytes(double bytes) {
  return with_unit(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
}

std::string format_decimal_bytes(double bytes) {
  return with_unit(bytes, 1000, {"B", "KB", "MB", "GB", "TB", "PB"});
}

}  // namespace shardbook::pictures
