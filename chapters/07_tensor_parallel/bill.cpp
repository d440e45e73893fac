#include "chapters/07_tensor_parallel/bill.h"

#include <algorithm>

namespace shardbook::tensor_parallel {
namespace {

/// Peak of activations with recomputation where each rank keeps 1/t of a block's
/// input. As for one device (chapters/common/run/memory.cpp), except that the
/// kept inputs are parts, and whole for the block whose backward runs.
double distributed_activations(const Options& options,
                               const ModelConfig& config,
                               const BillSizes& sizes) {
  const double t = sizes.t;
  const auto e = static_cast<double>(dtype_bytes(options.dtype));
  const double z = options.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(config.n_embd);
  const auto heads = static_cast<double>(config.n_head);
  const auto layers = static_cast<double>(config.n_layer);
  const double vocab = static_cast<double>(config.vocab_size) / t;
  const auto pieces = strided_micro_batches(options.batch, sizes.micro_batches);
  double peak = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto tokens = static_cast<double>(pieces[i].rows * options.seq);
    const double x = tokens * h * e, logits = tokens * vocab * e;
    const double kept = layers * x / t, scalars = 2 * z;
    const double block = tokens * ((4 + 12 / t) * h * e + (4 + heads / t) * z);
    const double gradients =
        (std::max(1 + 4 / t, 2 - 4 / t) + (options.dropout > 0 ? 1 : 0)) * x;
    const double at_loss = kept + 2 * x + 2 * logits + 3 * tokens * z + scalars;
    double at_head = kept + 3 * x + logits + 2 * tokens * z + scalars;
    double in_block =
        kept - x / t + block + std::max(gradients, 3 * x) + scalars;
    double at_end = 0;
    // Later micro-batches: beside accumulated gradients
    if (i > 0) {
      const double head = vocab * h * e;
      const double c_proj = (4 * h / t + (t > 1 ? 0 : 1)) * h * e;
      at_head += head;
      in_block = kept - x / t + block + std::max(gradients + c_proj, 3 * x) +
                 head + scalars;
      at_end = x + 2 * head + scalars;
    }
    peak = std::max({peak, at_loss, at_head, in_block, at_end});
  }
  return peak;
}

}  // namespace

double bytes_per_step(const Options& options, const ModelConfig& config,
                      const BillSizes& sizes) {
  const double t = sizes.t;
  const auto tokens = static_cast<double>(options.batch * options.seq);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const double stat = options.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(config.n_embd);
  const auto layers = static_cast<double>(config.n_layer);

  // f and g of attention and MLP, in forward and backward; once more forward
  // with recomputation. Gathering a saved input is half of an all-reduce
  const double per_layer = (sizes.recompute ? 6 : 4) +
                           (sizes.distribute_saved_activations ? 0.5 : 0);
  // g behind the embedding, f before the head
  const double all_reduced = (per_layer * layers + 2) * tokens * h * element;
  // Largest logit, logit of the target, sum of exponentials
  const double loss = 3 * tokens * stat;
  return 2 * (t - 1) / t * (all_reduced + loss);
}

MemoryBill memory(const Options& options, const ModelConfig& config,
                  const BillSizes& sizes) {
  ModelConfig padded = config;
  padded.vocab_size = sizes.vocabulary;
  MemoryBill bill = single_device_bill(
      options, padded,
      strided_micro_batches(options.batch, sizes.micro_batches),
      sizes.recompute, sizes.t);
  if (options.steps > 0 && sizes.distribute_saved_activations) {
    bill[MemoryKind::kActivation] =
        distributed_activations(options, padded, sizes);
  }
  // The norm, of which every rank has a part
  if (options.steps > 0) bill[MemoryKind::kCommunication] = 8;
  return bill;
}

}  // namespace shardbook::tensor_parallel
