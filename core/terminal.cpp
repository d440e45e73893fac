#include "core/terminal.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace shardbook {

bool obeys_escapes(int file) {
  const char* term = std::getenv("TERM");
  return isatty(file) == 1 && (term == nullptr || std::string(term) != "dumb");
}

}  // namespace shardbook
