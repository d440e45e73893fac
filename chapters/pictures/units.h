#pragma once

#include <string>
#include <vector>

namespace shardbook::pictures {

/// One unit of the numbers in a picture: {"ms", 1e-3}, {"KiB", 1024},
/// {"%", 0.01}.
struct Unit {
  std::string name = "";
  double size = 1;
};
inline const Unit kMilliseconds = {"ms", 1e-3};
inline const Unit kPercent = {"%", 0.01};

/// "0", "1.25 ms", "12.5 ms", "1250 ms": three digits, more before the point.
std::string text(double value, const Unit& unit);
/// The same without zeros at the end: "10 ms", for round numbers.
std::string round_text(double value, const Unit& unit);

/// The last of these units, from small to large, that is at most the value; the
/// first if none is.
Unit largest_below(double value, const std::vector<Unit>& units);

/// The units in which the largest number of an axis reads best.
Unit seconds_unit(double largest_s);
Unit bytes_unit(double largest_bytes);

/// "0 B", "999 B", "1.5 KiB", "12.3 MiB", "119 GiB".
std::string format_bytes(double bytes);
/// "0 B", "999 B", "1.5 KB", "12.3 MB", "119 GB": as links are measured.
std::string format_decimal_bytes(double bytes);

}  // namespace shardbook::pictures
