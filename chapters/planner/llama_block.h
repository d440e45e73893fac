#pragma once

// Llama's block on shapes: rotary positions, grouped queries, no biases, and a
// gated MLP, or experts in its place. Its weights are cut over tp as the
// chapter on tensor parallelism cuts them.

#include <cstdint>
#include <memory>

#include "chapters/planner/stage.h"
#include "comm/process_group.h"
#include "core/layers.h"

namespace shardbook::planner {

/// The groups of one rank, and what it needs to make a stage.
struct Place {
  ProcessGroup& tp;
  ProcessGroup& cp;
  ProcessGroup& ep;
  const DecoderSizes& sizes;
  const StageLayout& layout;
  /// Tokens of a sequence on this rank of cp.
  std::int64_t tokens() const { return sizes.seq / cp.size(); }
};

/// `index` counts the blocks of a stage. The experts' parameters have ".experts." in
/// their names.
std::unique_ptr<Module> llama_block(const Place& at, std::int64_t index,
                                    const InitOptions& init);

}  // namespace shardbook::planner
