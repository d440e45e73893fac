#pragma once

// How much a test runs under a sanitizer. A sanitizer judges each piece of code
// that runs, whatever the numbers are, and makes it ten times as slow. There, a
// test that repeats the same code with other sizes runs the few that differ in
// what they execute. A release build runs all of them.

#include <utility>
#include <vector>

namespace shardbook {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// `all` the cases of a test; under a sanitizer a `few` of them.
template <typename T>
std::vector<T> sized(std::vector<T> all, std::vector<T> few) {
  return kSanitized ? few : all;
}

/// World sizes of a test. Of `few`, one rank has no neighbours; three have a
/// first, a middle and a last one.
inline std::vector<int> world_sizes(std::vector<int> few = {1, 3}) {
  return sized<int>({1, 2, 3, 4, 8}, std::move(few));
}

}  // namespace shardbook
