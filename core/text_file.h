#pragma once

// Files of text, written so that a full disk is an error.

#include <string>

#include "core/check.h"

namespace shardbook {

/// A file was opened, and the system does not take what is written: the disk is
/// full, or a limit on sizes of files is reached (where SIGXFSZ is ignored).
class WriteError : public Error {
 public:
  using Error::Error;
};

/// Replaces what is in the file. `subject` begins the message, "SUBJECT cannot
/// be written: REASON". Throws Error when the file cannot be opened, and
/// WriteError when it cannot be written to its end.
void write_text_file(const std::string& path, const std::string& text,
                     const std::string& subject);

/// Throws this WriteError, with the reason in errno.
[[noreturn]] void fail_to_write(const std::string& subject);

}  // namespace shardbook
