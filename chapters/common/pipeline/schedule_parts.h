#pragma once

// Building blocks of schedules.

#include <string>
#include <vector>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline::parts {

using Actions = std::vector<Action>;

inline Action forward(int b, int chunk = 0) {
  return {ActionKind::kForward, b, chunk, false};
}
inline Action backward(int b, int chunk = 0) {
  return {ActionKind::kBackward, b, chunk, false};
}
inline Action backward_input(int b, int chunk = 0) {
  return {ActionKind::kBackwardInput, b, chunk, false};
}
inline Action backward_weight(int b, int chunk = 0) {
  return {ActionKind::kBackwardWeight, b, chunk, false};
}
inline Action update(int b) { return {ActionKind::kUpdate, b, 0, false}; }

/// A schedule without actions: stage s on rank s mod p, chunk s div p. Throws
/// Error for less than one rank or micro-batch.
Schedule empty(const std::string& name, int num_ranks, int micro_batches,
               int chunks = 1);

/// `warm_up` forwards, then pairs of one forward and one backward, then the
/// remaining backwards.
Actions warm_up_pairs_drain(const Actions& forwards, const Actions& backwards,
                            int warm_up);

}  // namespace shardbook::pipeline::parts
