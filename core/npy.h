#pragma once

// The header of NumPy's .npy: the type of its values, and where they lie.
// load_npy of xtensor.h makes a tensor of such a file.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardbook {

struct NpyHeader {
  /// As NumPy writes it: byte order, kind, bytes of a value. "<i8" is int64,
  /// "|u1" uint8, "|b1" bool.
  std::string type;
  bool is_fortran = false;  ///< the first index runs fastest
  std::vector<std::int64_t> shape;
  std::int64_t num_values = 1;
  std::size_t offset = 0;  ///< of the first value, in bytes
};

/// Reads a header of format version 1, 2 or 3. `start` has the file's first
/// bytes, 4 KiB or all of them; the file has `file_bytes`. Throws Error, which
/// does not name the file, where this is no such header, where the type has no
/// size, and where the values do not fill the rest of the file.
NpyHeader read_npy_header(std::string_view start, std::uint64_t file_bytes);

}  // namespace shardbook
