#pragma once

#include <cstdint>
#include <string>

namespace shardbook {

/// A number as files have it: the lowest byte first.
inline std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    text += static_cast<char>(value >> (8 * i));
  }
  return text;
}

}  // namespace shardbook
