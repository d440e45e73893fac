#include "core/internal/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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
  // An empty file cannot be mapped; the parser will say what it lacks.
  if (info.st_size == 0) return "";
  size_ = static_cast<std::size_t>(info.st_size);
  void* bytes = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (bytes == MAP_FAILED) return "cannot map it: " + errno_text();
  bytes_ = bytes;
  return "";
}

}  // namespace shardbook::internal
