// The memory that this program holds.

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero3.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"

namespace shardbook::zero {

MemoryBill zero_bill(const ZeroOptimizer& zero, const Options& options,
                     const ModelConfig& config, std::int64_t rows,
                     bool recompute) {
  const int stage = zero.options().stage;
  const bool is_offloaded = zero.options().offload_optimizer;
  const StateBytes bytes =
      state_bytes(options.dtype, options.optimizer, options.optimizer_options);
  // A shard of gradients may be wider than gradients are
  const double shard_gradient = zero.options().accumulate_f32
                                    ? std::max(bytes.gradient, 4.0)
                                    : bytes.gradient;
  const auto shard = static_cast<double>(zero.shard_numel());
  const double whole = shard * zero.group().size();
  MemoryBill bill = single_device_bill(options, config, rows, recompute);
  const bool trains = options.steps > 0;
  const bool has_updates = options.steps > zero.num_skipped_steps();
  const bool is_resumed = options.first_step > 0;

  // f32 copies of 16-bit weights exist from the beginning, the rest from the
  // first update, or from a checkpoint if steps follow
  const bool has_state = has_updates || (trains && is_resumed);
  const double masters = dtype_bytes(options.dtype) == 2 ? 4 : 0;
  bill[MemoryKind::kOptimizerState] =
      is_offloaded ? 0 : shard * (has_state ? bytes.optimizer : masters);
  if (const auto* sliced = dynamic_cast<const ZeroStage3*>(&zero)) {
    // Small parameters stay gathered
    bill[MemoryKind::kParameter] =
        (zero.options().offload_parameters ? 0 : shard * bytes.parameter) +
        static_cast<double>(sliced->persistent_bytes());
  } else {
    bill[MemoryKind::kParameter] = whole * bytes.parameter;
  }
  // Stage 1 keeps all gradients, later stages a shard
  bill[MemoryKind::kGradient] = !has_updates   ? 0
                                : stage == 1   ? whole * bytes.gradient
                                : is_offloaded ? 0
                                               : shard * shard_gradient;
  return bill;
}

}  // namespace shardbook::zero
