#include "chapters/07_tensor_parallel/bill.h"

#include <algorithm>

namespace shardbook::tensor_parallel {

double bytes_per_step(const Options& options, const ModelConfig& config,
                      const BillSizes& sizes) {
  const double t = sizes.t;
  const auto tokens = static_cast<double>(options.batch * options.seq);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const double stat = options.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(config.n_embd);
  const auto layers = static_cast<double>(config.n_layer);

  // f and g of attention and MLP, in forward and backward; once more forward
  // with recomputation
  const double per_layer = sizes.recompute ? 6 : 4;
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
  // The norm, of which every rank has a part
  if (options.steps > 0) bill[MemoryKind::kCommunication] = 8;
  return bill;
}

}  // namespace shardbook::tensor_parallel
