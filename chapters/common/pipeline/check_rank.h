#pragma once

// The rules that concern the list of one rank alone.

#include <deque>
#include <string>
#include <vector>

#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/pipeline/versions.h"

namespace shardbook::pipeline {

/// The actions that a rank has done so far.
class RankState {
 public:
  /// `stages`: by chunk, -1 for none. Keeps references.
  RankState(const Schedule& s, const ReadVersions& reads, int rank,
            const std::vector<int>& stages)
      : s_(s), reads_(reads), rank_(rank), chunks_(stages.size()) {
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
      chunks_[c].done.assign(static_cast<std::size_t>(s.num_micro_batches), 0);
      chunks_[c].stage = stages[c];
    }
  }

  /// Does the action. Returns the rule that it breaks, or "".
  std::string apply(const Action& a);
  /// What is missing at the end of the list, or "".
  std::string missing() const;

 private:
  struct Chunk {
    int stage = -1;
    std::vector<unsigned> done;  ///< by micro-batch, one bit per kind
    std::deque<int> waiting;     ///< micro-batches between I and W
    int last_gradient = -1;      ///< of B, W or I (biases and norms)
    int updated = -1;  ///< last micro-batch that an update has claimed
    int version = 0;   ///< updates so far
  };

  bool comes_here(int micro_batch, int chunk) const;
  std::string apply_update(const Action& a, Chunk* chunk);
  std::string apply_backward(const Action& a, Chunk* chunk);

  const Schedule& s_;
  const ReadVersions& reads_;
  int rank_;
  std::vector<Chunk> chunks_;
};

}  // namespace shardbook::pipeline
