#include "core/internal/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/check.h"

namespace shardbook::internal {
namespace {

std::string errno_text() { return std::generic_category().message(errno); }

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  SB_CHECK(path.find('\0') == std::string::npos,
           "cannot open a path that contains a zero byte");
  // Without O_NONBLOCK, a pipe would wait here for a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  SB_CHECK(file >= 0, path, ": cannot open for reading: ", errno_text());
  const std::string problem = map(file);
  ::close(file);
  SB_CHECK(problem.empty(), path, ": ", problem);
}

MappedFile::~MappedFile() {
  if (bytes_ != nullptr) ::munmap(bytes_, size_);
}

std::string MappedFile::map(int descriptor) {
  struct stat info;
  if (::fstat(descriptor, &info) != 0) {
    return "cannot read its size: " + errno_text();
  }
  if (S_ISDIR(info.st_mode)) return "is a folder; give a file";
  if (!S_ISREG(info.st_mode)) return "is not an ordinary file";
  // An empty file cannot be mapped; the parser reports what is missing.
  if (info.st_size == 0) return "";
  size_ = static_cast<std::size_t>(info.st_size);
  void* bytes = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (bytes == MAP_FAILED) return "cannot map it: " + errno_text();
  bytes_ = bytes;
  return "";
}

// --- Writing -----------------------------------------------------------------

namespace {

namespace fs = std::filesystem;

// Names to try before we give up.
constexpr int kMaxAttempts = 1000;

/// The name is not built from the target's, which may have the maximum length.
/// O_EXCL settles ties between processes of several hosts on one file system.
std::string next_temporary(const std::string& folder) {
  static std::atomic<unsigned> counter{0};
  return (fs::path(folder) / (".shardbook-" + std::to_string(::getpid()) + "-" +
                              std::to_string(counter++) + ".tmp"))
      .string();
}

/// Follows a link, so that the file is replaced and not the link.
std::string resolve_target(const std::string& path) {
  SB_CHECK(!path.empty(), "cannot write to an empty path");
  SB_CHECK(path.find('\0') == std::string::npos,
           "cannot write to a path that contains a zero byte");
  std::error_code error;
  if (fs::is_symlink(fs::symlink_status(path, error))) {
    const fs::path target = fs::canonical(path, error);
    SB_CHECK(!error, path, ": cannot follow the link: ", error.message());
    return target.string();
  }
  return path;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path)
    : label_(path), target_(resolve_target(path)) {
  struct stat info;
  if (::stat(target_.c_str(), &info) == 0) {
    SB_CHECK(!S_ISDIR(info.st_mode), label_,
             ": cannot write: it is a folder; give the name of a file");
    SB_CHECK(S_ISREG(info.st_mode), label_,
             ": cannot write: it exists and is not an ordinary file");
  }
  const fs::path parent = fs::path(target_).parent_path();
  folder_ = parent.empty() ? "." : parent.string();

  descriptor_ = ::open(folder_.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
  // EISDIR: a kernel that does not know O_TMPFILE.
  const bool is_refused =
      descriptor_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR ||
                          errno == EINVAL || errno == EINTR);
  if (is_refused) create_named();
  if (descriptor_ < 0) fail("create a file in this folder", errno);
}

void AtomicFile::create_named() {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    temporary_ = next_temporary(folder_);
    descriptor_ = ::open(temporary_.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) return;
    if (errno != EEXIST && errno != EINTR) break;
  }
  temporary_.clear();
}

void AtomicFile::give_name() {
  const std::string self = "/proc/self/fd/" + std::to_string(descriptor_);
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    const std::string name = next_temporary(folder_);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(),
                 AT_SYMLINK_FOLLOW) == 0) {
      temporary_ = name;
      return;
    }
    if (errno != EEXIST) break;
  }
  fail("give the new file a name", errno);
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::write(const void* data, std::size_t bytes) {
  SB_CHECK(descriptor_ >= 0, label_,
           ": cannot write: the file is complete or an earlier write failed");
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", errno);
    if (written == 0) fail("write", ENOSPC);
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  SB_CHECK(descriptor_ >= 0, label_,
           ": cannot commit: the file is complete or an earlier write failed");
  // Data first, then the name: a crash between the two leaves the old file.
  if (::fsync(descriptor_) != 0) fail("sync", errno);
  if (temporary_.empty()) give_name();
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) fail("close", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
    fail("rename the temporary file", errno);
  }
  temporary_.clear();
  const int folder =
      ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // A folder that may be written but not read cannot be synced from here.
  if (folder < 0) return;
  const int cause = ::fsync(folder) == 0 ? 0 : errno;
  ::close(folder);
  // Some file systems have nothing to sync in a folder and report that.
  if (cause != 0 && cause != EINVAL && cause != ENOTSUP) {
    fail("sync the folder", cause);
  }
}

void AtomicFile::fail(const char* step, int cause) {
  discard();
  SB_FAIL(label_, ": cannot ", step, ": ",
          std::generic_category().message(cause));
}

void AtomicFile::discard() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

}  // namespace shardbook::internal
