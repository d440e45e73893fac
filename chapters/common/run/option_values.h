#pragma once

// Texts of a command line read as values.

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace shardbook {

/// Sets the value; returns what is wrong with the text, or nothing.
template <typename T>
std::string parse_number(const std::string& text, T* value, T min, T max) {
  constexpr bool is_real = std::is_floating_point_v<T>;
  T number{};
  std::size_t used = 0;
  try {
    if constexpr (is_real) {
      number = std::stod(text, &used);
    } else {
      const long long wide = std::stoll(text, &used);
      number = static_cast<T>(wide);
      if (static_cast<long long>(number) != wide) used = 0;
    }
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) {
    return fmt::format("not {}; give a value from {} to {}",
                       is_real ? "a number" : "an integer", min, max);
  }
  if constexpr (is_real) {
    if (std::isnan(number)) return "not a number";
  }
  if (number < min || number > max) {
    return fmt::format("out of range; give a value from {} to {}", min, max);
  }
  *value = number;
  return "";
}

/// Bytes from "512MiB", "2GB" or "100000"; returns as parse_number.
std::string parse_bytes(const std::string& text, std::int64_t* bytes);

/// What is wrong with a name: nothing where it is among those allowed, else
/// "give one of ...; OTHERWISE".
std::string check_name(const std::string& name,
                       const std::vector<std::string>& allowed,
                       const std::string& otherwise = "");

/// How many letters too many, missing, wrong or swapped with the next turn one
/// word into the other.
std::size_t num_typos(const std::string& a, const std::string& b);

/// "2,1,1": whole numbers from 1 up. Throws Error "OPTION TEXT: ALLOWED" for
/// anything else.
std::vector<int> read_counts(const std::string& option, const std::string& text,
                             const std::string& allowed);

}  // namespace shardbook
