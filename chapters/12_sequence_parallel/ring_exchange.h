#pragma once

// Tensors that travel around a ring of ranks.
//
//   step 0      step 1      step 2        (the block that each rank holds)
//   r0: b0      r0: b2      r0: b1
//   r1: b1      r1: b0      r1: b2        step n on rank r: block (r - n) mod c
//   r2: b2      r2: b1      r2: b0
//
// Every rank sends to the next one and receives from the one before. A hop is
// under way while the rank computes with the block that it holds: two buffers
// are enough, whatever the number of ranks.

#include <string>
#include <vector>

#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "comm/process_group.h"
#include "core/tensor.h"
#include "sim/cluster.h"

namespace shardbook::sequence_parallel {

/// The rank whose block visits `rank` at step n.
inline int source_at(int rank, int step, int c) {
  return (rank - step + c) % c;
}

/// One move of some tensors to the next rank.
class Hop {
 public:
  Hop() = default;
  /// Starts it: sends each tensor, and receives one like it. Tags `first_tag`,
  /// `first_tag` + 1, ... keep concurrent hops apart.
  Hop(ProcessGroup& cp, const Tensors& leaving, int first_tag,
      const std::string& label);
  /// The tensors of the previous rank. The sent buffers are free again.
  Tensors wait();

 private:
  Tensors leaving_, arriving_;
  std::vector<Work> works_;
};

/// Whether every rank of these rings (world ranks) has as much work as the
/// others, and hops over a link like theirs: each stays in its node, or each
/// leaves it. Such ranks keep step on shapes.
bool ranks_are_alike(const sim::Cluster& cluster,
                     const std::vector<std::vector<int>>& rings, Layout layout);

}  // namespace shardbook::sequence_parallel
