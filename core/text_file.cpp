#include "core/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace shardbook {

void fail_to_write(const std::string& subject) {
  throw WriteError(subject + " cannot be written: " + std::strerror(errno));
}

void write_text_file(const std::string& path, const std::string& text,
                     const std::string& subject) {
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  SB_CHECK(file >= 0, subject, " cannot be written: ", std::strerror(errno));
  bool is_written = true;
  for (std::size_t done = 0; is_written && done < text.size();) {
    const ssize_t count = ::write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    is_written = count >= 0;
    if (is_written) done += static_cast<std::size_t>(count);
  }
  const int cause = errno;
  // A file system on a network may report a full disk only here.
  const bool is_closed = ::close(file) == 0;
  if (!is_written) errno = cause;
  if (!is_written || !is_closed) fail_to_write(subject);
}

}  // namespace shardbook
