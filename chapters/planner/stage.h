#pragma once

// One pipeline stage of a decoder, run by itself on shapes: its blocks, cut
// over a tensor-parallel and a context-parallel group, with the embedding or
// the head of the model where the stage has one.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "sim/cluster.h"

namespace shardbook {
struct ModelConfig;
}

namespace shardbook::planner {

/// `make()`, once for each key at the place of the call.
template <typename Key, typename Make>
const auto& once_for(const Key& key, const Make& make) {
  static std::map<Key, decltype(make())> known;
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known.emplace(key, make()).first->second;
}

/// Sizes of a block of GPT-2 or Llama.
struct DecoderSizes {
  std::int64_t hidden = 0, heads = 0, seq = 0, vocabulary = 0;
  /// Rows of GPT-2's table of positions; 0: as many as a rank has tokens.
  std::int64_t positions = 0;
  /// A model of the Llama family with the layers that train: its block's table
  /// has all sizes but these four. Null: what follows says them.
  std::shared_ptr<const ModelConfig> model = nullptr;
  std::int64_t kv_heads = 0;  ///< 0: as many as heads
  /// Width of the MLP; 0: four times hidden.
  std::int64_t mlp = 0;
  std::int64_t head_dim = 0;  ///< 0: hidden / heads; Llama's block only
  /// Every second block attends to only so many tokens; 0: no block does.
  std::int64_t window = 0;
  /// Experts in place of Llama's MLP, each `mlp` wide, and how many of them a
  /// token visits.
  std::int64_t experts = 0, experts_per_token = 0;
  /// Llama's block: rotary positions, no biases, and a gated MLP.
  bool is_llama = false;
  bool is_gated = true;
  /// Queries and keys are normalised, head by head (Qwen3).
  bool normalizes_heads = false;

  /// All fields, by which runs are remembered.
  auto key() const {
    return std::make_tuple(hidden, heads, seq, vocabulary, positions, model,
                           kv_heads, mlp, head_dim, window, experts,
                           experts_per_token, is_llama, is_gated,
                           normalizes_heads);
  }
  std::int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  std::int64_t head_width() const {
    return head_dim > 0 ? head_dim : hidden / heads;
  }
  /// The model's config has experts.
  bool has_own_experts() const;
  std::int64_t chosen_experts() const;  ///< per token
  /// Of such a model, the first blocks, which have none.
  std::int64_t dense_blocks() const;
  std::int64_t mlp_width() const { return mlp > 0 ? mlp : 4 * hidden; }
};

enum class Recompute {
  kNothing,
  kAttention,  ///< selective
  kBlocks,     ///< full
  /// torchtitan's "selective op": backward keeps the results of attention, of
  /// every other product and of reduce-scatters, and recomputes the rest.
  /// Llama's block only; a step's time, not its memory.
  kEverySecondProduct,
  /// The blocks 0, 2, ... of a stage in full; the same.
  kEverySecondBlock
};

/// How the ranks share the work, and the types that they compute in.
struct StageLayout {
  int tp = 1, cp = 1;
  /// Ranks that share the experts, 1: each has all. Those of a model that trains
  /// are replicas, and ranks of tp have the same experts; else tp's ranks are
  /// among them.
  int ep = 1;
  /// A token travels once to each node that has some of its experts, and is
  /// copied there (DeepEP); false: once for each expert.
  bool sends_once_per_node = false;
  bool cuts_tokens = false;  ///< Megatron-LM's sequence parallelism
  Recompute recompute = Recompute::kNothing;
  std::int64_t micro_batch = 1;
  DType dtype = DType::kF16;
  double dropout = 0;
  /// Backwards are also run in two parts, as zero bubble requires.
  bool splits_backward = false;
  /// Llama's linear layers compute in FP8: inputs, and gradients of outputs,
  /// are converted first. The caller sets the device's rate to FP8's.
  bool converts_to_fp8 = false;
  /// The scale of a conversion is the maximum of its input, which is read once
  /// more (current scaling); false: the maximum of earlier steps.
  bool scales_by_maximum = false;

  /// All fields.
  auto key() const {
    return std::make_tuple(tp, cp, ep, sends_once_per_node, cuts_tokens,
                           recompute, micro_batch, dtype, dropout,
                           splits_backward, converts_to_fp8, scales_by_maximum);
  }
};

struct StageParts {
  std::int64_t blocks = 0;
  bool has_embedding = false, has_head = false;
  bool is_tied = false;  ///< both have the same table
  /// Blocks in front, of a model with experts, that have none.
  std::int64_t dense = 0;

  auto key() const {
    return std::make_tuple(blocks, has_embedding, has_head, is_tied, dense);
  }
};

/// A parameter of one rank.
struct ParameterSize {
  double elements = 0;
  bool is_expert = false, is_table = false;  ///< that of tokens
  /// See hybrid::OverTp.
  bool is_whole = false, is_partial = false;
};

/// Parameters of a stage in the order of its layers; none of a Llama without
/// DecoderSizes::model.
struct ParameterSizes {
  std::vector<ParameterSize> embedding, dense_block, block, head;
  std::int64_t blocks = 0, dense = 0;  ///< `dense` of the blocks
  const std::vector<ParameterSize>& of_block(std::int64_t index) const {
    return index < dense ? dense_block : block;
  }
};

/// Bytes at one moment, beside what a rank holds between its actions.
struct Held {
  double activations = 0, gradients = 0, messages = 0;
  double total() const { return activations + gradients + messages; }
  Held operator-(const Held& other) const {
    return {activations - other.activations, gradients - other.gradients,
            messages - other.messages};
  }
};

/// The fullest moments of a backward in each part of a stage.
struct BackwardPeaks {
  Held head, blocks, embedding;
};

/// Seconds of a stage's action: alone, with an idle device before and after; and
/// where the host has issued all before it long ago, of the device, and of the host,
/// which goes on to the next.
struct ActionTime {
  double s = 0, device_s = 0, host_s = 0;
};

/// Of the actions of a stage, for one micro-batch.
struct ActionTimes {
  ActionTime forward, backward;
  /// The first micro-batch's backward, right after its forward: it creates the
  /// gradients, and adds to none.
  ActionTime first_backward;
  /// A backward in two parts (zero bubble), where the layout asks for it: the
  /// gradient of the input, and of the weights.
  ActionTime backward_input, backward_weight;
  ActionTime first_backward_input, first_backward_weight;

  std::array<ActionTime*, 7> all_times() {
    return {&forward,
            &backward,
            &first_backward,
            &backward_input,
            &backward_weight,
            &first_backward_input,
            &first_backward_weight};
  }
  /// The parts of a backward, each with the first micro-batch's.
  std::vector<std::pair<ActionTime, ActionTime>> backwards(bool splits) const {
    if (!splits) return {{backward, first_backward}};
    return {{backward_input, first_backward_input},
            {backward_weight, first_backward_weight}};
  }
};

/// Numbers of one rank and one micro-batch.
struct StageRun : ActionTimes {
  /// The part of a forward and a backward in which the device computes.
  double busy_s = 0;
  /// Bytes that the rank sends over each kind of link: over tp, and over cp.
  std::map<std::string, double> sent_bytes;
  /// Seconds for the norm of all gradients and the update of all parameters.
  double optimizer_s = 0;
  double parameters = 0;
  double expert_parameters = 0;  ///< a part of them
  ParameterSizes sizes;
  /// Activations that wait for backward, the stage's input included; between the
  /// two parts of a backward.
  double kept_bytes = 0, kept_for_weights_bytes = 0;
  /// Gradients of parameters that the first part of a first backward creates.
  double input_gradients = 0;
  /// The fullest moments of this micro-batch.
  Held forward_peak;
  BackwardPeaks backward_peaks;
  Held backward_input_peak, backward_weight_peak;
  /// Of a first micro-batch, which creates gradients: with these.
  BackwardPeaks first_backward_peaks;
  sim::Trust trust = sim::Trust::kInterpolated;
};

/// Throws Error where sizes do not divide by the groups.
StageRun run_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                   const StageLayout& layout, const StageParts& parts);
/// The same, computed once and then remembered for all calls.
const StageRun& known_stage(const sim::Cluster& cluster,
                            const DecoderSizes& sizes,
                            const StageLayout& layout, const StageParts& parts);
/// The same from runs of one and of two blocks of each kind: every further block
/// adds as much as the second.
StageRun composed_stage(const sim::Cluster& cluster, const DecoderSizes& sizes,
                        const StageLayout& layout, const StageParts& parts);

}  // namespace shardbook::planner
