#pragma once

// Models that the book counts and does not train are planned as a model that it
// does: a Llama, or a Mixtral, with the same matrices. A plain MLP of width f is a
// gated one of 2 f / 3: as many weights, operations and kept activations.

#include <cstdint>
#include <string>
#include <vector>

namespace shardbook::planner {

struct StandIn {
  /// A config's text; empty: the model itself trains.
  std::string config;
  /// What the plan of it leaves out, in sentences.
  std::vector<std::string> remarks;
};

/// Samples have `seq` tokens; 0: as many as the model has positions. Throws Error
/// where parameters or operations per token would differ by more than 3 %, with
/// the part that differs most.
StandIn stand_in_of(const std::string& model, std::int64_t seq);

}  // namespace shardbook::planner
