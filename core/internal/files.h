#pragma once

// Files that are mapped to be read, and files that appear whole or not at all.

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

/// Writes to a file without a name in the folder of `path`; commit() syncs it,
/// gives it a temporary name, renames that and syncs the folder. Until then
/// `path` is untouched, and a killed process leaves nothing behind. Where the
/// file system has no files without a name, the file has its temporary name
/// from the beginning; the destructor or any failure removes it. Throws
/// shardbook::Error that names the path, the step and the cause.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* step, int cause);
  void discard() noexcept;
  void create_named();
  void give_name();

  std::string label_;   // as the caller wrote it, for messages
  std::string target_;  // links followed
  std::string folder_;
  std::string temporary_;  // empty while the file has no name
  int descriptor_ = -1;
};

}  // namespace shardbook::internal
