#pragma once

// Ways to run ranks, for suites that hold on every backend.

#include <functional>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace shardbook::test {

/// The body of a rank: returns an error, or nothing. Ranks do not assert: one
/// that stopped early would leave its peers waiting.
using RankBody = std::function<std::string(ProcessGroup&)>;

struct World {
  std::string name;  ///< "Threads"
  /// Runs the body on each rank; returns their results, by rank.
  std::function<std::vector<std::string>(int world_size, const RankBody&)> run;
  /// Why this machine cannot run this many ranks; null if it always can.
  std::function<std::string(int world_size)> why_not = nullptr;
  std::vector<int> sizes = {1, 2, 3, 4, 8};
  /// A small message leaves its buffer at once, received or not.
  bool buffers_small_messages = true;
};

/// The worlds of this program (each test program defines its own).
std::vector<World> conformance_worlds();

}  // namespace shardbook::test
