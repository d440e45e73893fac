#pragma once

// What the tests of files share: raw bytes in and out.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::testing {

/// How many files are in the folder, hidden ones included.
inline int num_files(const TempFolder& folder) {
  using Files = std::filesystem::directory_iterator;
  return static_cast<int>(std::distance(Files(folder.path()), Files()));
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// A safetensors file: the length in eight bytes, the header, the data.
inline std::string file_bytes(std::uint64_t length, const std::string& rest) {
  std::string result(8, '\0');
  for (int i = 0; i < 8; ++i) {
    result[i] = static_cast<char>(length >> (8 * i) & 0xff);
  }
  return result + rest;
}
inline std::string file_with(const std::string& header,
                             std::size_t data_bytes = 0) {
  return file_bytes(header.size(), header + std::string(data_bytes, 'd'));
}

}  // namespace shardbook::testing
