#include "chapters/common/pipeline/check_rank.h"

#include <algorithm>

#include "chapters/common/pipeline/at.h"

namespace shardbook::pipeline {
namespace {

unsigned bit(ActionKind kind) { return 1u << static_cast<int>(kind); }

constexpr unsigned kF = 1, kB = 2, kI = 4, kW = 8;

}  // namespace

bool RankState::comes_here(int b, int chunk) const {
  const int stage = chunks_[at(chunk)].stage;
  if (stage < 0) return false;
  const Place& place = s_.place(b, stage);
  return place.rank == rank_ && place.chunk == chunk;
}

std::string RankState::apply(const Action& a) {
  const std::string name = to_string(a);
  if (a.chunk < 0 || at(a.chunk) >= chunks_.size()) {
    return name + " for chunk " + std::to_string(a.chunk) + "; there are " +
           std::to_string(chunks_.size());
  }
  if (a.micro_batch < 0 || a.micro_batch >= s_.num_micro_batches) {
    return name + " for micro-batch " + std::to_string(a.micro_batch) +
           "; there are " + std::to_string(s_.num_micro_batches);
  }
  Chunk& chunk = chunks_[at(a.chunk)];
  if (a.kind == ActionKind::kUpdate) return apply_update(a, &chunk);
  if (!comes_here(a.micro_batch, a.chunk)) {
    return name + ", whose route does not lead here";
  }
  unsigned& done = chunk.done[at(a.micro_batch)];
  if (done & bit(a.kind)) return name + " a second time";
  if (a.kind != ActionKind::kForward) {
    const std::string fault = apply_backward(a, &chunk);
    if (!fault.empty()) return fault;
  } else if (!s_.flushes) {
    const int version = reads_.of(chunk.stage, a.micro_batch);
    if (version > chunk.version) {
      return name + " reads version " + std::to_string(version) +
             " of the weights, which no update has made yet";
    }
  }
  done |= bit(a.kind);
  return "";
}

std::string RankState::apply_backward(const Action& a, Chunk* chunk) {
  const auto name = [&](ActionKind kind, int b) {
    return to_string(Action{kind, b, a.chunk, false});
  };
  const int b = a.micro_batch;
  const unsigned done = chunk->done[at(b)];
  const std::string self = to_string(a);
  if (!(done & kF)) {
    return self + " before its forward " + name(ActionKind::kForward, b);
  }
  if (a.kind != ActionKind::kBackwardWeight) {
    if (done & (kB | kI)) {
      return self + " after another backward of micro-batch " +
             std::to_string(b);
    }
    if (a.kind == ActionKind::kBackwardInput) chunk->waiting.push_back(b);
  } else {
    if (done & kB) return self + " after the whole backward of it";
    if (!(done & kI)) {
      return self + " before its input gradient " +
             name(ActionKind::kBackwardInput, b);
    }
    if (chunk->waiting.front() != b) {
      return self + " while " +
             name(ActionKind::kBackwardWeight, chunk->waiting.front()) +
             " has waited longer; they run first in, first out";
    }
    chunk->waiting.pop_front();
  }
  if (b <= chunk->updated) {
    return self + " after an update that claims it";
  }
  chunk->last_gradient = std::max(chunk->last_gradient, b);
  return "";
}

std::string RankState::apply_update(const Action& a, Chunk* chunk) {
  const std::string self = to_string(a);
  if (s_.flushes) {
    return self + " in a schedule that flushes: its update follows the lists";
  }
  if (a.micro_batch <= chunk->updated) {
    return self + " after an update that claims as much";
  }
  for (int b = chunk->updated + 1; b <= a.micro_batch; ++b) {
    if (comes_here(b, a.chunk) && !(chunk->done[at(b)] & (kB | kW))) {
      return self + " before the gradient of micro-batch " + std::to_string(b);
    }
  }
  if (chunk->last_gradient > a.micro_batch) {
    return self + " after the gradient of micro-batch " +
           std::to_string(chunk->last_gradient) + ", which it does not claim";
  }
  const int claimed = a.micro_batch - chunk->updated;
  const int size = reads_.micro_batches_per_update(chunk->stage);
  if (claimed != size) {
    return self + " claims " + std::to_string(claimed) +
           " micro-batches; each update of this stage claims " +
           std::to_string(size) +
           " (micro_batches_per_step times the stage's ranks)";
  }
  chunk->updated = a.micro_batch;
  ++chunk->version;
  return "";
}

std::string RankState::missing() const {
  for (int c = 0; at(c) < chunks_.size(); ++c) {
    const Chunk& chunk = chunks_[at(c)];
    for (int b = 0; b < s_.num_micro_batches; ++b) {
      if (!comes_here(b, c)) continue;
      const unsigned done = chunk.done[at(b)];
      const ActionKind kind = !(done & kF)  ? ActionKind::kForward
                              : (done & kI) ? ActionKind::kBackwardWeight
                                            : ActionKind::kBackward;
      if (!(done & (kB | kW))) return to_string({kind, b, c, false});
    }
    if (chunk.stage >= 0 && !s_.flushes &&
        chunk.updated < s_.num_micro_batches - 1) {
      return "the update for micro-batch " +
             std::to_string(s_.num_micro_batches - 1);
    }
  }
  return "";
}

}  // namespace shardbook::pipeline
