#pragma once

// One collective call, for Gloo's algorithms and for ours.
//
// Gloo's collectives move data through buffers that their context creates. Our
// context creates buffers of Messages: they use the world's connections, know
// the call, observe its timeout, and throw the Error that names the failed
// rank. A failure ends the waits inside Gloo like all others, and groups need
// no connections of their own.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/gloo/gloo_world.h"

namespace gloo {
class Context;
}

namespace shardbook::internal {

/// The messages of one call among the ranks of a group.
struct Channel {
  GlooWorld* world = nullptr;
  CallInfo info;
  int rank = 0;            ///< in the group
  std::vector<int> ranks;  ///< world ranks
  /// Identifies the call among those in flight, equally on all ranks. When the
  /// ranks' calls differ, so do their slots, and no messages meet.
  std::uint64_t slot = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  Message send(int to, std::uint64_t step, const void* data,
               std::size_t bytes) const;
  Message recv(int from, std::uint64_t step, void* data,
               std::size_t bytes) const;
  /// For Gloo's stateless collectives, while this channel lives.
  std::shared_ptr<::gloo::Context> context() const;
};

}  // namespace shardbook::internal
