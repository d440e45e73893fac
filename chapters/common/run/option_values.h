#pragma once

// Texts of a command line read as values.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace shardbook {

/// Sets the value; returns what is wrong with the text, or nothing. T: int,
/// std::int64_t, std::uint64_t or double.
template <typename T>
std::string parse_number(const std::string& text, T* value, T min, T max);

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
