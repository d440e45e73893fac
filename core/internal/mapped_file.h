#pragma once

#include <cstddef>
#include <string>

namespace shardbook::internal {

/// An ordinary file mapped read-only; its pages are read when touched. Throws
/// shardbook::Error that names the path and the cause.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  /// Null when the file is empty.
  const void* bytes() const { return bytes_; }
  std::size_t size() const { return size_; }

 private:
  /// Returns what went wrong; empty when nothing did.
  std::string map(int descriptor);

  void* bytes_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace shardbook::internal
