#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace shardbook {

/// Whether a file descriptor is a terminal that obeys escape sequences. Those
/// with TERM=dumb, as inside an editor, print them.
inline bool obeys_escapes(int file) {
  const char* term = std::getenv("TERM");
  return isatty(file) == 1 &&
         (term == nullptr || std::strcmp(term, "dumb") != 0);
}

}  // namespace shardbook
