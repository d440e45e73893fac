#pragma once

// Ranks for the length of a test: threads that sum in a fixed order.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/launch.h"
#include "core/check.h"

namespace shardbook {

/// What `body` returns on each rank, by rank, if it returns anything.
/// `run(world_size, function)` calls the function on every rank.
template <typename Run, typename Body>
auto by_rank(int world_size, const Run& run, Body body) {
  using Returned = decltype(body(std::declval<ProcessGroup&>()));
  if constexpr (std::is_void_v<Returned>) {
    run(world_size, body);
  } else {
    // A vector of bool has several ranks' results in one byte: ranks would race.
    using Result =
        std::conditional_t<std::is_same_v<Returned, bool>, int, Returned>;
    std::vector<Result> results(static_cast<std::size_t>(world_size));
    run(world_size, [&](ProcessGroup& world) {
      results[static_cast<std::size_t>(world.rank())] = body(world);
    });
    return results;
  }
}

/// The same on the ranks of these options.
template <typename Body>
auto on_ranks(int world_size, Body body, const LaunchOptions& options) {
  return by_rank(
      world_size,
      [&](int size, const auto& each) { run_ranks(size, each, options); },
      body);
}

/// The same on thread ranks that sum in a fixed order.
template <typename Body>
auto on_ranks(int world_size, Body body, double timeout_s = 60) {
  LaunchOptions options;
  options.deterministic = true;
  options.timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000));
  return on_ranks(world_size, body, options);
}

/// What `body` threw on some rank; "" when all ended well.
template <typename Body>
std::string error_on_ranks(int world_size, Body body, double timeout_s = 60) {
  try {
    on_ranks(world_size, body, timeout_s);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace shardbook
