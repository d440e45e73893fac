// The bill of a GPT on dp x tp ranks: the formulas of the page.

#include <algorithm>

#include "chapters/11_dtensor/trainer.h"

namespace shardbook::dtensor {

double Trainer::parameters_of_tp() const {
  const auto v = static_cast<double>(config().vocab_size);
  const auto h = static_cast<double>(config().n_embd);
  // Cut by tp: c_attn and c_fc with their biases, both c_proj without
  const double cut = 3 * h * h + 3 * h + 4 * h * h + 4 * h + h * h + 4 * h * h;
  const double whole = 2 * h + 4 * h;  // biases of c_proj, two norms
  return v * h + static_cast<double>(config().n_positions) * h + 2 * h +
         static_cast<double>(config().n_layer) * (cut / t_ + whole);
}

double Trainer::predicted_bytes() const {
  const auto element = static_cast<double>(dtype_bytes(options_.dtype));
  const auto h = static_cast<double>(config().n_embd);
  const auto v = static_cast<double>(config().vocab_size);
  const auto m = static_cast<double>(micro_batches_);
  const double tokens =
      static_cast<double>(options_.batch * options_.seq) / (d_ * m);
  // tp: four all-reduces per layer
  const double tp = 4 * static_cast<double>(config().n_layer) * 2 * (t_ - 1) /
                    t_ * tokens * h;
  // dp: every use of a parameter, of which wte has two. R: an all-reduce; S(0):
  // an all-gather and a reduce-scatter.
  const double dp = 2 * (d_ - 1) / d_ * (parameters_of_tp() + v * h);
  const double stat = options_.dtype == DType::kF64 ? 8 : 4;
  // The sum of losses, and the count of targets
  const double loss = 2 * 2 * (d_ - 1) / d_ * stat;
  return static_cast<double>(options_.steps) *
         (m * ((tp + dp) * element + loss) + predicted_norm_bytes());
}

MemoryBill Trainer::bill() const {
  const bool is_fsdp = how_.data_parallel == "fsdp";
  const auto element = static_cast<double>(dtype_bytes(options_.dtype));
  const double stat = options_.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(config().n_embd);
  const auto v = static_cast<double>(config().vocab_size);
  const auto layers = static_cast<double>(config().n_layer);
  const double parameters = parameters_of_tp() / (is_fsdp ? d_ : 1);

  MemoryBill bill;
  bill[MemoryKind::kParameter] = parameters * element;
  for (const MemoryKind kind :
       {MemoryKind::kGradient, MemoryKind::kOptimizerState,
        MemoryKind::kActivation, MemoryKind::kInput,
        MemoryKind::kCommunication}) {
    bill[kind] = 0;
  }
  if (options_.steps == 0) return bill;
  bill[MemoryKind::kOptimizerState] =
      optimizer_states(options_) * parameters * stat;
  const auto rows = static_cast<double>(options_.batch / micro_batches_);
  const auto s = static_cast<double>(options_.seq);
  bill[MemoryKind::kInput] = rows * s * 2 * 8;
  bill[MemoryKind::kCommunication] = 8;
  // One rank on dp: the tied table has two gradients until they are added.
  // Several: both come summed over dp, and are added before they are booked
  const bool is_alone = d_ == 1;
  bill[MemoryKind::kGradient] = (parameters + (is_alone ? v * h : 0)) * element;
  bill[MemoryKind::kActivation] = kNotPredicted;
  // Of a token, a block keeps x, two norms' outputs and x + attention whole,
  // and q, k, v, attention, c_fc and GELU by parts
  const double tokens = rows / d_ * s;
  const auto heads = static_cast<double>(config().n_head);
  const double in_blocks =
      layers * tokens *
      ((4 * h + 12 * h / t_) * element + (4 + heads / t_) * stat);
  // The loss, the gradients of the global and of the rank's mean
  const double scalars = (is_alone ? 2 : 3) * stat;
  const auto positions = static_cast<double>(config().n_positions);
  // What FSDP has gathered stays for backward: wte twice, and not wpe
  const double gathered =
      is_fsdp && !is_alone
          ? (parameters_of_tp() + (v - positions) * h) * element
          : 0;
  const double at_loss =
      in_blocks + gathered +
      tokens * (2 * h * element + 3 * stat + 2 * v * element) + scalars;
  // Beside the gradients of the logits and of ln_f's output
  // Later micro-batches hold new gradients beside the accumulated ones: the
  // head's until the embedding's joins it, and that of c_proj for a moment
  const bool is_later = micro_batches_ > 1;
  const double head = is_later ? v * h * element : 0;
  const double c_proj = is_later ? 4 * h * h / t_ * element : 0;
  const double at_head =
      in_blocks + tokens * ((3 * h + v) * element + 2 * stat) + head + scalars;
  // dy and GELU's two gradients, beside its input but not its output; then the
  // gradient of the MLP's input, a copy of which is being summed
  const double has_dropout = options_.dropout > 0 ? 1 : 0;
  const double at_gelu = in_blocks +
                         tokens * (1 + has_dropout + 4 / t_) * h * element +
                         head + c_proj + scalars;
  const double at_sum =
      in_blocks + tokens * (3 - 8 / t_) * h * element + head + scalars;
  const double at_end =
      is_later ? tokens * h * element + 2 * head + scalars : 0;
  if (is_alone) {
    bill[MemoryKind::kActivation] =
        std::max({at_loss, at_head, at_gelu, at_sum, at_end});
    return bill;
  }
  // Over dp, gradients of weights have copies in flight, whose widest moment is
  // left open where it may be above the loss
  const double in_flight =
      3 * std::max({(v + positions) * h, 4 * h * h / t_}) * element;
  if (at_loss >
      gathered + std::max({at_head, at_gelu, at_sum, at_end}) + in_flight) {
    bill[MemoryKind::kActivation] = at_loss;
  }
  return bill;
}

}  // namespace shardbook::dtensor
