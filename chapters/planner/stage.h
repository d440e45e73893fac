#pragma once

// One pipeline stage of a decoder, run by itself on shapes: its blocks, cut
// over a tensor-parallel and a context-parallel group, with the embedding or
// the head of the model where the stage has one.

#include <cstdint>
#include <map>
#include <string>

#include "core/dtype.h"
#include "sim/cluster.h"

namespace shardbook::planner {

/// Sizes of GPT-2's block, or of Llama's.
struct DecoderSizes {
  std::int64_t hidden = 0, heads = 0, seq = 0, vocabulary = 0;
  std::int64_t kv_heads = 0;  ///< 0: as many as heads
  /// Width of the MLP; 0: four times hidden.
  std::int64_t mlp = 0;
  std::int64_t head_dim = 0;  ///< 0: hidden / heads; Llama's block only
  /// The attention of every second block sees so many tokens; 0: of none.
  std::int64_t window = 0;
  /// Experts in the place of Llama's MLP, each `mlp` wide, and how many of them
  /// a token visits.
  std::int64_t experts = 0, experts_per_token = 0;
  /// As Llama: rotary positions, no biases, and a gated MLP.
  bool is_llama = false;
  bool is_gated = true;
  /// Queries and keys are normalised, head by head (Qwen3).
  bool normalizes_heads = false;

  std::int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  std::int64_t head_width() const {
    return head_dim > 0 ? head_dim : hidden / heads;
  }
  std::int64_t mlp_width() const { return mlp > 0 ? mlp : 4 * hidden; }
};

enum class Recompute {
  kNothing,
  kAttention,  ///< selective
  kBlocks,     ///< full
  /// torchtitan's "selective op": backward has the results of attention, of
  /// every other product and of what was reduce-scattered, and computes the
  /// rest again. Llama's block only; a step's time, not its memory.
  kEverySecondProduct
};

/// How the ranks share the work, and in what they compute.
struct StageLayout {
  int tp = 1, cp = 1;
  /// Ranks that share the experts, those of tp among them; 1: each has all.
  int ep = 1;
  /// A token travels once to each node that has some of its experts, and is
  /// copied there (DeepEP); false: once for each expert.
  bool sends_once_per_node = false;
  bool cuts_tokens = false;  ///< Megatron-LM's sequence parallelism
  Recompute recompute = Recompute::kNothing;
  std::int64_t micro_batch = 1;
  DType dtype = DType::kF16;
  double dropout = 0;
  /// Backwards are also run in two parts, as zero bubble needs them.
  bool splits_backward = false;
  /// Llama's linear layers take FP8: what they read, and the gradients of what
  /// they return, are converted first. Their speed is the device's.
  bool converts_to_fp8 = false;
  /// The scale of a conversion is the maximum of what it converts, which is
  /// read once more (current scaling); false: that of earlier steps.
  bool scales_by_maximum = false;
};

struct StageParts {
  std::int64_t blocks = 0;
  bool has_embedding = false, has_head = false;

  bool operator==(const StageParts& other) const {
    return blocks == other.blocks && has_embedding == other.has_embedding &&
           has_head == other.has_head;
  }
};

/// Of one rank and one micro-batch.
struct StageRun {
  /// Each by itself, from an idle device to an idle device.
  double forward_s = 0, backward_s = 0;
  /// Of the first micro-batch, which has no gradients to add to, in a row with
  /// its forward.
  double first_backward_s = 0;
  /// A forward and a backward in a row of many, where the host runs ahead.
  double both_s = 0;
  /// Of the time of both, the part in which the device computes.
  double busy_s = 0;
  /// What the rank sends over each kind of link: over tp, and over cp.
  std::map<std::string, double> sent_bytes;
  /// The norm of all gradients, and the update of all parameters.
  double optimizer_s = 0;
  double parameters = 0;
  double expert_parameters = 0;  ///< a part of them
  /// A backward in two parts (zero bubble), where the layout asks for it: the
  /// gradient of the input, and of the weights.
  double backward_input_s = 0, backward_weight_s = 0;
  /// Activations that wait for backward, the stage's input included.
  double kept_bytes = 0;
  /// The most activations of this micro-batch at one time, in forward and in
  /// backward; and, between the two parts of a backward, what is kept.
  double forward_peak_bytes = 0, backward_peak_bytes = 0;
  double kept_for_weights_bytes = 0;
  /// Gradients of weights that are computed beside those that they are added
  /// to, and buffers of messages: the most at one time.
  double passing_gradient_bytes = 0, message_bytes = 0;
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Throws Error where sizes do not divide by the groups.
StageRun run_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                   const StageLayout& layout, const StageParts& parts);
/// The same, each once for all calls.
const StageRun& known_stage(const sim::Cluster& cluster,
                            const DecoderSizes& sizes,
                            const StageLayout& layout, const StageParts& parts);
/// The same from runs of one and of two blocks: every further block adds as
/// much as the second.
StageRun composed_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                        const StageLayout& layout, const StageParts& parts);

}  // namespace shardbook::planner
