#pragma once

// Errors and checks. A message names the operation, the value and what is
// allowed; checks stay on in release builds.

#include <sstream>
#include <stdexcept>
#include <string>

namespace shardbook {

/// Every error of the book: bad input, misuse, failure of a peer.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace internal {
template <typename... Parts>
[[noreturn]] void throw_error(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}
}  // namespace internal

}  // namespace shardbook

/// Throws shardbook::Error with the concatenated parts unless `condition`.
#define SB_CHECK(condition, ...)                       \
  do {                                                 \
    if (!(condition)) {                                \
      ::shardbook::internal::throw_error(__VA_ARGS__); \
    }                                                  \
  } while (false)

/// Throws shardbook::Error with the concatenated parts.
#define SB_FAIL(...) ::shardbook::internal::throw_error(__VA_ARGS__)
