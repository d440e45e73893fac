#include "chapters/13_moe/activations.h"

#include <algorithm>

#include "chapters/common/sharded/parts.h"

namespace shardbook::moe {
namespace {

constexpr double kIndex = 8;  // bytes of an i64

struct Sizes {
  double tokens, choices, slots;  // S, S k, E C of a micro-batch
  double h, heads, vocab, layers, experts;
  double ep, t = 1;
  double element, stat;  // bytes: of an activation; of statistics, of the gate
  bool has_many_choices, expert_tp;
  /// Gradients meet others of the same parameters, to which they are added.
  bool accumulates;
};

bool is_plain(const Options& options, const ModelConfig& config,
              const MoeOptions& moe) {
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    if (experts_of_layer(moe, i) != moe.gate.num_experts) return false;
  }
  return moe.gate.num_experts > 1 && !moe.is_dropless && !moe.is_naive &&
         moe.gate.drop_tokens && moe.gate.noise == Noise::kNone &&
         moe.z_coefficient == 0 && !has_mlp_beside(moe) && options.dropout == 0;
}

Sizes sizes_of(const Options& options, const ModelConfig& config,
               const MoeOptions& moe, const BillSizes& bill) {
  Sizes s;
  const std::int64_t tokens =
      options.batch / (bill.dp * bill.micro_batches) * options.seq;
  s.tokens = static_cast<double>(tokens);
  s.choices = s.tokens * static_cast<double>(moe.gate.k);
  s.experts = static_cast<double>(moe.gate.num_experts);
  s.slots = s.experts * static_cast<double>(capacity(tokens, moe.gate, true));
  s.h = static_cast<double>(config.n_embd);
  s.heads = static_cast<double>(config.n_head);
  s.vocab = static_cast<double>(padded_vocabulary(config.vocab_size, bill.t));
  s.layers = static_cast<double>(config.n_layer);
  s.ep = bill.ep, s.t = bill.t;
  s.element = static_cast<double>(dtype_bytes(options.dtype));
  s.stat = options.dtype == DType::kF64 ? 8 : 4;
  s.has_many_choices = moe.gate.k > 1;
  s.expert_tp = moe.expert_tensor_parallel;
  // ZeRO-1 has all gradients from the beginning; ZeRO-2 none after a micro-batch
  s.accumulates =
      bill.zero_stage == 1 || (bill.zero_stage == 0 && bill.micro_batches > 1);
  return s;
}

// What the forward of one block keeps for its backward:
//
//   norms, attention        as a dense block does (common/run/memory.cpp)
//   gate       S E          probabilities; 2 E: their means, and the load
//              S k          weights; k >= 2: also probabilities, and their sum
//              2 S k        indices of choices, i64: of their gates, their slots
//   dispatch   E C          index of each slot's token, i64
//              E C h/t      slots at their experts (--expert-tp: all E C h)
//   experts    8 E C h/t    inputs of GELU and of c_proj
//   combine    E C h        slots that came back
//              S k h        rows of choices, which the weights multiply
double block_bytes(const Sizes& s) {
  const double attention = s.tokens * ((4 + 4 / s.t) * s.h * s.element +
                                       (4 + s.heads / s.t) * s.stat);
  double gate = (s.tokens + 2) * s.experts * s.stat + s.choices * s.element +
                2 * s.choices * kIndex;
  if (s.has_many_choices) gate += (s.choices + s.tokens) * s.stat;
  // In 16 bits: its input and weight in f32
  if (s.element == 2) gate += (s.tokens + s.experts) * s.h * s.stat;
  const double there = s.expert_tp ? 1 : 1 / s.t;
  const double slots =
      s.slots * (kIndex + (there + 8 / s.t + 1) * s.h * s.element);
  return attention + gate + slots + s.choices * s.h * s.element;
}

}  // namespace

double predicted_activations(const Options& options, const ModelConfig& config,
                             const MoeOptions& moe, const BillSizes& bill) {
  if (!is_plain(options, config, moe)) return kNotPredicted;
  const Sizes s = sizes_of(options, config, moe, bill);
  const double e = s.element, z = s.stat, vocab = s.vocab / s.t;
  const double y = s.tokens * s.h * e, rows = s.choices * s.h * e;
  const double slots = s.slots * s.h * e, own_slots = slots / s.t;
  const double blocks = s.layers * block_bytes(s);
  // The loss, and the gradient that backward starts from
  const double scalars = 2 * z;

  // Logits and their gradient, behind ln_f; then the gradient of its output
  const double at_loss =
      blocks + scalars + s.tokens * ((2 * s.h + 2 * vocab) * e + 3 * z);
  // The head's gradient is there until the embedding's joins it
  const double head = s.accumulates ? vocab * s.h * e : 0;
  const double at_head =
      blocks + scalars + head + s.tokens * ((3 * s.h + vocab) * e + 2 * z);

  // In the last block, whose loss has begun its backward. Combine: gradients of
  // choices, their products with rows, and the weights' gradients
  const double inside = blocks + scalars + z + head + y;
  const double at_combine =
      inside + (s.has_many_choices ? rows : 0) + 2 * rows + s.choices * e;
  // Gradients of the slots that came back; rows and weights are gone
  const double behind = inside + s.choices * (z - e) - rows;
  const double at_slots = behind + rows + slots;
  // On their way to the experts; their index and the slots are gone
  const double leaving = behind - s.choices * kIndex - slots;
  const double at_exchange = leaving + slots + own_slots;
  const double at_gather = s.expert_tp ? leaving + own_slots + 2 * slots : 0;
  // The last product of the experts: gradients of outputs, of inputs, and where
  // others wait for them, of weights
  const double weights =
      s.experts / s.ep * 4 * s.h * s.h * e / (s.expert_tp ? s.t : 1);
  const double at_product = leaving + (s.expert_tp ? slots : own_slots) +
                            4 * own_slots + (s.accumulates ? weights : 0);
  // The embedding's gradient meets the head's
  const double at_end = s.accumulates ? y + 2 * head + scalars : 0;
  return std::max({at_loss, at_head, at_combine, at_slots, at_exchange,
                   at_gather, at_product, at_end});
}

}  // namespace shardbook::moe
