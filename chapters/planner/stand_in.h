#pragma once

// Models that the book counts and does not train are planned as a model that it
// does: a Llama, or a Mixtral, with the same matrices. A plain MLP of width f is a
// gated one of 2 f / 3: as many weights, operations and kept activations. Latent
// attention, shared experts and dense blocks in front of those with experts are
// rows of the block's table (DeepSeek-V3): they are planned as they are.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace shardbook {
struct ModelConfig;
}

namespace shardbook::planner {

struct StandIn {
  /// What is planned; null: the model itself trains.
  std::shared_ptr<const ModelConfig> config;
  /// What the plan of it leaves out, in sentences.
  std::vector<std::string> remarks;
};

/// Samples have `seq` tokens; 0: as many as the model has positions. Throws Error
/// where parameters or operations per token would differ by more than 3 %, with
/// the part that differs most.
StandIn stand_in_of(const std::string& model, std::int64_t seq);

}  // namespace shardbook::planner
