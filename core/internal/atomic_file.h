#pragma once

// A file that appears whole or not at all.

#include <cstddef>
#include <string>

namespace shardbook::internal {

/// Writes to a temporary name in the folder of `path`; commit() syncs, renames
/// and syncs the folder. Until then `path` is untouched, and the destructor or
/// any failure removes the temporary file. Throws shardbook::Error that names
/// the path, the step and the cause.
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

  std::string label_;   // as the caller wrote it, for messages
  std::string target_;  // links followed
  std::string folder_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace shardbook::internal
