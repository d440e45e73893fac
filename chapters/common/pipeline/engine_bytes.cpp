// What the ranks of an engine send, by its schedule and the shapes of messages.

#include "chapters/common/pipeline/engine.h"

namespace shardbook::pipeline {

// Between two stages, m messages go forward and m go backward, unless both
// stages are on one rank.
double Engine::predicted_bytes() {
  const int listed = schedule_.num_micro_batches;
  return sent_bytes(0, listed) +
         schedule_.repeats * sent_bytes(listed - schedule_.period, listed);
}

double Engine::predicted_redo_bytes() {
  double bytes = 0;
  const int stage = stages_[0];
  for (int b = 0; b < num_first_forwards(world_.rank()); ++b) {
    if (!is_last(stage) && rank_of(b, stage + 1) != world_.rank()) {
      bytes += forward_bytes(spec(b, stage + 1));
    }
  }
  return bytes;
}

double Engine::sent_bytes(int first, int last) {
  double bytes = 0;
  for (int b = first; b < last; ++b) {
    for (int stage = 0; stage < schedule_.num_stages; ++stage) {
      if (!is_here(b, stage)) continue;
      if (!is_last(stage) && !is_here(b, stage + 1)) {
        bytes += forward_bytes(spec(b, stage + 1));
      }
      if (stage > 0 && !is_here(b, stage - 1)) {
        bytes += backward_bytes(spec(b, stage));
      }
      for (const std::string& name : model_.stage(stage).outgoing()) {
        bytes += forward_bytes(skip_spec(name, b, stage + 1));
      }
      for (const std::string& name : model_.stage(stage).incoming()) {
        bytes += backward_bytes(skip_spec(name, b, stage));
      }
    }
  }
  return bytes;
}

}  // namespace shardbook::pipeline
