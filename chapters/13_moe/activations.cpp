#include "chapters/13_moe/bill.h"
#include "chapters/common/sharded/parts.h"

namespace shardbook::moe {
namespace {

constexpr double kIndex = 8;  // bytes of an i64

}  // namespace

double slots_of_expert(const MoeOptions& moe, std::int64_t experts,
                       double tokens) {
  GateOptions gate = moe.gate;
  gate.num_experts = experts;
  return static_cast<double>(
      capacity(static_cast<std::int64_t>(tokens), gate, true));
}

bool keeps_known_bytes(const MoeOptions& moe) {
  return !moe.depends_on_routing() && !moe.is_naive &&
         (moe.gate.noise == Noise::kNone ||
          moe.gate.noise == Noise::kRSample) &&
         moe.z_coefficient == 0;
}

// Kept in the place of an MLP:
//
//   gate       S E          probabilities; 2 E: their means, and the load
//              S k          weights; k >= 2: also probabilities, and their sum
//              2 S k        indices of choices, i64: of their gates, their slots
//   dispatch   E C          index of each slot's token, i64
//              E C h/t      slots at their experts (--expert-tp: all E C h)
//   experts    8 E C h/t    inputs of GELU and of c_proj
//   combine    E C h        slots that came back
//              S k h        rows of choices, which the weights multiply
//   an MLP beside the experts
//              8 S h/t      inputs of GELU and of c_proj
//   --residual S (2 h + 4)  what the two weights multiply; the weights twice
//   --gate-shared-expert    S (h + 1): the same of one
double kept_by_experts(const ModelConfig& config, const MoeOptions& moe,
                       std::int64_t experts, const KeptSizes& z) {
  const auto h = static_cast<double>(config.n_embd);
  const auto all = static_cast<double>(experts);
  const double tokens = z.rows * z.tokens;
  const double choices = tokens * static_cast<double>(moe.gate.k);
  const double slots = all * slots_of_expert(moe, experts, tokens);
  double kept =
      (tokens + 2) * all * z.stat + choices * z.element + 2 * choices * kIndex;
  if (moe.gate.k > 1) kept += (choices + tokens) * z.stat;
  // In 16 bits: the gate's input and weight in f32
  if (z.element == 2) kept += (tokens + all) * h * z.stat;
  const double there = moe.expert_tensor_parallel ? 1 : 1 / z.t;
  kept += slots * (kIndex + (there + 8 / z.t + 1) * h * z.element);
  double beside = has_mlp_beside(moe) ? 8 * h / z.t : 0;
  if (moe.use_residual) beside += 2 * h + 4;
  if (moe.gate_shared_expert) beside += h + 1;
  return kept + (choices * h + tokens * beside) * z.element;
}

double deferred_by_experts(const ModelConfig& config, const MoeOptions& moe,
                           std::int64_t experts, const KeptSizes& z) {
  const auto h = static_cast<double>(config.n_embd);
  const double tokens = z.rows * z.tokens;
  const auto all = static_cast<double>(experts);
  const double slots = all * slots_of_expert(moe, experts, tokens);
  return (slots * 10 / z.t + tokens) * h * z.element + tokens * all * z.stat;
}

double kept_by_block(const ModelConfig& config, const MoeOptions& moe,
                     std::int64_t experts, const KeptSizes& z) {
  const double dense = shardbook::kept_by_block(config, z);
  if (experts == 1) return dense;
  // In the place of the MLP: 8 h/t of a token
  const double mlp = z.rows * z.tokens * 8 *
                     static_cast<double>(config.n_embd) / z.t * z.element;
  return dense - mlp + kept_by_experts(config, moe, experts, z);
}

double predicted_activations(const ModelConfig& config, const MoeOptions& moe,
                             const KeptSizes& sizes) {
  if (!keeps_known_bytes(moe)) return kNotPredicted;
  ModelConfig padded = config;
  padded.vocab_size =
      padded_vocabulary(config.vocab_size, static_cast<int>(sizes.t));
  double kept = kept_by_head(padded, sizes) + sizes.stat;
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    kept += kept_by_block(config, moe, experts_of_layer(moe, i), sizes);
  }
  return kept;
}

}  // namespace shardbook::moe
