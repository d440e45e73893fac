#pragma once

// What the tests of files share.

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>

#include "tests/support/errors.h"
#include "tests/support/files.h"
#include "tests/support/little_endian.h"
#include "tests/support/temp_folder.h"

namespace shardbook::testing {

/// How many files are in the folder, hidden ones included.
inline int num_files(const TempFolder& folder) {
  using Files = std::filesystem::directory_iterator;
  return static_cast<int>(std::distance(Files(folder.path()), Files()));
}

/// A safetensors file: the length in eight bytes, the header, the data.
inline std::string file_bytes(std::uint64_t length, const std::string& rest) {
  return little_endian(length, 8) + rest;
}
inline std::string file_with(const std::string& header,
                             std::size_t data_bytes = 0) {
  return file_bytes(header.size(), header + std::string(data_bytes, 'd'));
}

}  // namespace shardbook::testing
