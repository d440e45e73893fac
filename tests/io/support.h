#pragma once

// What the tests of files share: a folder that goes away, raw bytes in and
// out, and the message of an Error.

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "core/check.h"

namespace shardbook::testing {

/// A fresh folder, removed with everything in it.
class TempFolder {
 public:
  TempFolder() {
    std::string name =
        (std::filesystem::temp_directory_path() / "shardbook-io-XXXXXX")
            .string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("cannot create a temporary folder");
    }
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }
  /// How many files are there, hidden ones included.
  int num_files() const {
    int count = 0;
    for (const auto& file : std::filesystem::directory_iterator(path_)) {
      (void)file;
      ++count;
    }
    return count;
  }

 private:
  std::string path_;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// The message of the Error that `body` throws; empty when it throws none.
template <typename Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
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
