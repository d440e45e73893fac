#include "chapters/07_tensor_parallel/bill.h"

#include <algorithm>

#include "chapters/07_tensor_parallel/partial_gradients.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::tensor_parallel {

double partial_bytes(const Options& options, const ModelConfig& config, int t) {
  const PartialSizes partial = partial_sizes(config, t);
  const double n = partial.sharers;
  return (2 * (t - 1.0) / t * partial.norms +
          2 * (n - 1) / n * partial.shared) *
         static_cast<double>(dtype_bytes(options.dtype));
}

double partial_s(const Options& options, const ModelConfig& config, int t) {
  const PartialSizes partial = partial_sizes(config, t);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const double norms =
      partial.norms > 0 ? textbook::all_reduce(t, partial.norms * element) : 0;
  return norms +
         textbook::all_reduce(partial.sharers, partial.shared * element);
}

double bytes_per_step(const Options& options, const ModelConfig& config,
                      const BillSizes& sizes) {
  const double t = sizes.t;
  const auto tokens = static_cast<double>(options.batch * options.seq);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const double stat = options.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(config.n_embd);
  const auto layers = static_cast<double>(config.n_layer);

  // f and g of attention and MLP, in forward and backward; forward again with
  // recomputation. Gathering a saved input costs half an all-reduce
  const double per_layer = (sizes.recompute ? 6 : 4) +
                           (sizes.distribute_saved_activations ? 0.5 : 0);
  // g after the embedding, f before the head
  const double all_reduced = (per_layer * layers + 2) * tokens * h * element;
  // Largest logit, logit of the target, sum of exponentials
  const double loss = 3 * tokens * stat;
  return 2 * (t - 1) / t * (all_reduced + loss) +
         partial_bytes(options, config, sizes.t);
}

MemoryBill memory(const Options& options, const ModelConfig& config,
                  const BillSizes& sizes) {
  ModelConfig padded = config;
  padded.vocab_size = sizes.vocabulary;
  MemoryBill bill = single_device_bill(
      options, padded,
      strided_micro_batches(options.batch, sizes.micro_batches),
      sizes.recompute, sizes.t);
  if (options.steps == 0 || !sizes.distribute_saved_activations) return bill;
  // Each rank keeps 1/t of a block's input
  KeptSizes kept = kept_sizes(
      options,
      strided_micro_batches(options.batch, sizes.micro_batches)[0].rows);
  kept.recompute = true, kept.t = sizes.t;
  bill[MemoryKind::kActivation] = static_cast<double>(config.n_layer) *
                                      kept_by_block(padded, kept) / sizes.t +
                                  kept_by_head(padded, kept) + kept.stat;
  return bill;
}

namespace {

// Names follow the page.
double micro_batch_s(const Options& options, const ModelConfig& config,
                     const BillSizes& sizes, std::int64_t rows) {
  textbook::GptTimes times =
      textbook::gpt_times(options, config, static_cast<double>(rows));
  times.vocabulary = static_cast<double>(sizes.vocabulary) / sizes.t;
  const BlockTable block = block_table(config);
  const auto seconds = [&](const BlockPart& part) {
    return times.product(part.operations(times.seq, sizes.t));
  };
  const double c = seconds(block.qkv), k = seconds(block.attention),
               p = seconds(block.proj), f = seconds(block.up),
               g = seconds(block.down);
  const double x =
      times.tokens * times.h * static_cast<double>(dtype_bytes(options.dtype));
  const double stat = options.dtype == DType::kF64 ? 8 : 4;
  const double a = textbook::all_reduce(sizes.t, x);

  const double forward = c + k + p + a + f + g + a;
  // f's messages overlap with the product of the weight's gradient
  double backward =
      2 * g + f + std::max(f, a) + 2 * p + 2.5 * k + c + std::max(c, a);
  if (sizes.recompute) backward += forward;
  if (sizes.distribute_saved_activations) {
    backward += textbook::all_gather(sizes.t, x);
  }
  const double loss = 3 * textbook::all_reduce(sizes.t, times.tokens * stat);
  return a + static_cast<double>(config.n_layer) * (forward + backward) +
         3 * times.head() + loss + a;
}

}  // namespace

double step_s(const Options& options, const ModelConfig& config,
              const BillSizes& sizes) {
  if (!textbook::is_chosen(options)) return kNotPredicted;
  // The norm
  double sum =
      textbook::all_reduce(sizes.t, 8) + partial_s(options, config, sizes.t);
  for (const MicroBatch& piece :
       strided_micro_batches(options.batch, sizes.micro_batches)) {
    sum += micro_batch_s(options, config, sizes, piece.rows);
  }
  return sum;
}

}  // namespace shardbook::tensor_parallel
