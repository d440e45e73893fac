#pragma once

// The cost of an expert-parallel training step for a rank: the page's formulas.

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/13_moe/moe_layer.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/report.h"
#include "chapters/common/run/strategy.h"

namespace shardbook::moe {

struct BillSizes {
  int dp = 1, ep = 1, t = 1;
  int zero_stage = 0;
  bool offload = false;
  std::int64_t micro_batches = 1;
  std::int64_t skipped = 0;  ///< steps that f16 has left out
  /// f32 masters of 16-bit weights at stage 0, which ZeRO has in any case.
  bool has_masters = false;
  int edp() const { return dp / ep; }
};

/// Bytes that this rank's dropless layers have sent over ep ranks: rows of `width`
/// elements there and back, their gradients, and the counts.
double dropless_bytes(const MoeRecord& record, double width, double element,
                      int ep);
/// Elements that one layer's dispatch and combine send, forward and backward, of
/// `slots` slots of each expert: 4 (ep-1)/ep E C M / t, and TP's gathers.
double layer_elements(const MoeOptions& moe, std::int64_t experts, double slots,
                      double width, const BillSizes& sizes);

// --- Activations that a forward keeps (activations.cpp) ---------------------------

/// False where the bytes depend on the data, or have no formula: dropless
/// dispatch, noise in the gate's logits, a z-loss, masks in place of indices.
bool keeps_known_bytes(const MoeOptions& moe);
/// Slots per expert, of `experts`, for a rank's tokens of a micro-batch.
double slots_of_expert(const MoeOptions& moe, std::int64_t experts,
                       double tokens);
/// Activations that gate, dispatch, experts and combine of a layer keep.
double kept_by_experts(const ModelConfig& config, const MoeOptions& moe,
                       std::int64_t experts, const KeptSizes& sizes);
/// Activations for deferred weight gradients: inputs of products and gradients
/// of outputs, including the gate's.
double deferred_by_experts(const ModelConfig& config, const MoeOptions& moe,
                           std::int64_t experts, const KeptSizes& sizes);
/// The same for a block with this many experts; 1: a dense block.
double kept_by_block(const ModelConfig& config, const MoeOptions& moe,
                     std::int64_t experts, const KeptSizes& sizes);
/// The same for a rank; kNotPredicted where it is not known.
double predicted_activations(const ModelConfig& config, const MoeOptions& moe,
                             const KeptSizes& sizes);

// --- The bill ---------------------------------------------------------------------

/// Elements of this rank's parameters.
struct Parameters {
  double dense = 0, experts = 0;
};
/// Elements that a rank holds of them: under ZeRO, each of the two padded.
Parameters held_parameters(const MoeOptions& moe, const BillSizes& sizes,
                           const Parameters& here);
/// Bytes of parameters, gradients and optimizer state.
MemoryBill states_bill(const Options& options, const MoeOptions& moe,
                       const BillSizes& sizes, const Parameters& here);
/// Bytes of options.steps steps, memory held, and the time of a step. Where shapes
/// depend on the routing, the loads in `record` count the rows that were sent.
Bill predicted_bill(const Options& options, const ModelConfig& config,
                    const MoeOptions& moe, const BillSizes& sizes,
                    const MoeRecord& record);

}  // namespace shardbook::moe
