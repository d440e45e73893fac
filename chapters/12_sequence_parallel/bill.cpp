#include "chapters/12_sequence_parallel/bill.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/textbook.h"
#include "chapters/common/run/training.h"

namespace shardbook::sequence_parallel {
namespace {

/// Sizes of a micro-batch of `rows` samples.
struct Sizes {
  double c, rows, s, h, queries, heads, layers, vocabulary, positions;
  double element, sum;  // bytes of an element, and of one of a sum
  double z() const { return rows * s * h; }
  double all_queries() const { return rows * s * queries; }
};

/// Of keys, and of values.
std::int64_t key_heads(const ModelConfig& config) {
  return config.is_llama() ? config.llama.kv_heads : config.n_head;
}
std::int64_t moved_key_heads(const SequenceOptions& setup,
                             const ModelConfig& config, std::int64_t c) {
  const std::int64_t heads = key_heads(config);
  // Ulysses repeats them until the ranks share them
  return setup.kind == Kind::kUlysses ? std::lcm(heads, c) : heads;
}

Sizes sizes_of(const Options& options, const ModelConfig& config, int c,
               std::int64_t rows) {
  Sizes sizes;
  sizes.c = c;
  sizes.rows = static_cast<double>(rows);
  sizes.s = static_cast<double>(options.seq);
  sizes.h = static_cast<double>(config.n_embd);
  sizes.queries = static_cast<double>(block_table(config).attention.out);
  sizes.heads = static_cast<double>(config.n_head);
  sizes.layers = static_cast<double>(config.n_layer);
  sizes.vocabulary = static_cast<double>(config.vocab_size);
  sizes.positions = static_cast<double>(config.n_positions);
  sizes.element = static_cast<double>(dtype_bytes(options.dtype));
  sizes.sum = options.dtype == DType::kF64 ? 8 : 4;
  return sizes;
}

/// Activations that one rank keeps for backward.
double kept_bytes(const Options& own, const ModelConfig& config,
                  const SequenceOptions& setup, const Sizes& z,
                  std::int64_t rows) {
  // Each layer keeps the same as one device with this many tokens
  const KeptSizes sizes = kept_sizes(own, rows);
  const double kept = kept_by_model(config, sizes);
  if (kept == kNoClaim || setup.kind == Kind::kRing) return kept;
  const double tokens = sizes.rows * sizes.tokens;
  if (setup.kind == Kind::kUlysses) {
    // And the output of attention by heads, as well as by tokens; repeated keys
    const auto repeated = static_cast<double>(
        moved_key_heads(setup, config, static_cast<std::int64_t>(z.c)) -
        key_heads(config));
    const double copies = 2 * repeated * (z.queries / z.heads);
    return kept + z.layers * tokens * (z.queries + copies) * z.element;
  }
  // Rows of scores in place of the logarithms of their sums; with dropout twice,
  // before and after it
  const double copies = own.dropout > 0 ? 2 : 1;
  return kept +
         z.layers * tokens * z.heads * (copies * z.s * z.element - z.sum);
}

}  // namespace

LayerElements layer_elements(const SequenceOptions& setup, double c, double z,
                             double kv_share) {
  const double part = (c - 1) / c * z;
  switch (setup.kind) {
    case Kind::kUlysses:
      // Q and O, K and V: all-to-alls of z / c
      return {(2 + 2 * kv_share) * part / c, (2 + 2 * kv_share) * part / c, 0};
    case Kind::kRsa:
      return {2 * part * kv_share, (setup.all_reduce ? 6 : 4) * part * kv_share,
              0};
    default:
      // K and V make c - 1 hops, dK and dV one more
      return {2 * part * kv_share, 2 * part * kv_share, 2 * z * kv_share};
  }
}

double key_share(const SequenceOptions& setup, const ModelConfig& config,
                 int c) {
  return static_cast<double>(moved_key_heads(setup, config, c)) /
         static_cast<double>(config.n_head);
}

namespace {

/// Bytes of one step; `keys`: key_share.
double step_bytes(const Sizes& z, const SequenceOptions& setup, double keys,
                  double parameters, double micro_batches) {
  if (z.c == 1) return 0;
  const LayerElements layer = layer_elements(setup, z.c, z.all_queries(), keys);
  const double attention =
      z.layers * ((layer.forward + layer.backward) * z.element +
                  layer.backward_sums * z.sum);
  const double losses = micro_batches * 2 * z.sum;
  const double norm = 8;
  const double all_reduced = parameters * z.element + losses + norm;
  return attention + 2 * (z.c - 1) / z.c * all_reduced;
}

MemoryBill memory(const Options& options, const ModelConfig& config,
                  const SequenceOptions& setup, int c,
                  const std::vector<MicroBatch>& pieces) {
  // One device with the rank's tokens
  Options own = options;
  own.seq = options.seq / c;
  MemoryBill bill = single_device_bill(own, config, pieces);
  if (c == 1 || options.steps == 0) return bill;
  const std::int64_t rows = pieces[0].rows;
  bill[MemoryKind::kActivation] =
      kept_bytes(own, config, setup, sizes_of(options, config, c, rows), rows);
  return bill;
}

}  // namespace

// --- Time ------------------------------------------------------------------------

using textbook::all_gather;
using textbook::all_reduce;

AttentionTimes attention_times(const SequenceOptions& setup, double c, double s,
                               double pair_s, double part, double part_of_sums,
                               double kv_share) {
  const double n = s / c, square = n * n * pair_s;
  const double half = n * (n + 1) / 2 * pair_s;
  if (c == 1) return {2 * half, 5 * half};
  if (setup.kind == Kind::kUlysses) {
    // Q, K and V go, the result comes back. An exchange of a part takes as long
    // as gathering it from all ranks
    const double all = s * (s + 1) / 2 * pair_s / c;
    const double exchanges =
        2 * (all_gather(c, part) + all_gather(c, part * kv_share));
    return {2 * all + exchanges, 5 * all + exchanges};
  }
  if (setup.kind == Kind::kRsa) {
    const double ring =
        (c - 1) * std::max(square, textbook::message(part * kv_share)) + square;
    const double sum = (setup.all_reduce ? 2 : 1) *
                       textbook::reduce_scatter(c, c * part * kv_share);
    return {2 * ring, 2 * ring + 2 * (c * square + sum)};
  }
  // Ring attention: the pairs of the first step and of each later step. Striped
  // ranks see half of a square in all of them
  const double other = setup.layout == Layout::kContiguous ? square
                       : setup.layout == Layout::kZigzag   ? square / 2
                                                           : half;
  const double hop = 2 * textbook::message(part * kv_share);
  const double sums = 2 * textbook::message(part_of_sums * kv_share);
  const double forward =
      std::max(2 * half, hop) + (c - 2) * std::max(2 * other, hop) + 2 * other;
  // Gradients of a block leave when it is computed, before the next K and V
  const double backward = std::max(5 * half, hop) +
                          (c - 2) * std::max(5 * other, hop + sums) +
                          std::max(5 * other, sums) + sums;
  return {forward, backward};
}

namespace {

double step_s(const Options& options, const ModelConfig& config,
              const SequenceOptions& setup, int c, double parameters,
              const std::vector<MicroBatch>& pieces) {
  // RSA's masks come from the host in the first step
  const bool sends_masks = setup.kind == Kind::kRsa && options.steps == 1;
  if (!textbook::has_model_times(options, config) || sends_masks) {
    return kNotPredicted;
  }
  double sum = 0;
  for (const MicroBatch& piece : pieces) {
    const Sizes z = sizes_of(options, config, c, piece.rows);
    textbook::GptTimes times = textbook::gpt_times(options, config, z.rows);
    times.t = c;  // a rank has 1/c of the tokens, and of all products
    const double part = z.all_queries() / c;
    const AttentionTimes attention = attention_times(
        setup, c, z.s, 2 * z.queries * z.rows / textbook::kRate,
        part * z.element, part * z.sum, key_share(setup, config, c));
    sum += 3 * (z.layers * times.dense() + times.head()) +
           z.layers * (attention.forward + attention.backward) +
           all_reduce(c, 2 * z.sum);
  }
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  return sum + all_reduce(c, parameters * element) + all_reduce(c, 8);
}

}  // namespace

Bill sequence_bill(const Options& options, const ModelConfig& config,
                   const SequenceOptions& setup, int c,
                   std::int64_t num_parameters, std::int64_t micro_batches) {
  const auto pieces = strided_micro_batches(options.batch, micro_batches);
  const auto parameters = static_cast<double>(num_parameters);
  const double bytes =
      step_bytes(sizes_of(options, config, c, options.batch), setup,
                 key_share(setup, config, c), parameters,
                 static_cast<double>(micro_batches));
  return {static_cast<double>(options.steps) * bytes,
          memory(options, config, setup, c, pieces),
          step_s(options, config, setup, c, parameters, pieces)};
}

// --- Megatron's ------------------------------------------------------------------

namespace {

/// Activations that Megatron's layers keep: attention and norms of heads have all
/// tokens of some heads, everything else has its inputs on own tokens, or t-th
/// parts of all.
double megatron_kept(const Options& options, const ModelConfig& padded, int t,
                     std::int64_t rows, bool recompute_attention) {
  const KeptSizes sizes = kept_sizes(options, rows);
  const BlockTable block = block_table(padded);
  double cut = 0, cut_statistics = 0, own = 0, own_statistics = 0;
  const auto has_own_heads = [&](const BlockPart& part) {
    own += part.kept(t);
    own_statistics += part.statistics(t);
  };
  for (const BlockPart* part :
       {&block.norm_1, &block.qkv, &block.proj, &block.norm_2, &block.up,
        &block.gate, &block.down}) {
    cut += part->kept();
    cut_statistics += part->statistics();
  }
  for (const BlockPart& norm : block.head_norms) has_own_heads(norm);
  has_own_heads(block.attention);
  // No logarithms of the softmax's sums
  if (recompute_attention) own_statistics -= block.attention.statistics(t);

  const double tokens = sizes.rows * sizes.tokens, e = sizes.element;
  const double blocks = static_cast<double>(padded.n_layer) *
                        (tokens * (own * e + own_statistics * sizes.stat) +
                         tokens / t * (cut * e + cut_statistics * sizes.stat));
  // The last norm: its own input and statistics, its output gathered; the part of
  // logits
  const double x = tokens * block.norm_1.kept() * e;
  return blocks + x / t + tokens / t * block.norm_1.statistics() * sizes.stat +
         x +
         tokens *
             (static_cast<double>(padded.vocab_size) / t * e + sizes.stat) +
         sizes.stat;
}

/// Seconds of a step on the cluster `textbook`.
double megatron_step_s(const Options& options, const ModelConfig& padded, int t,
                       const std::vector<MicroBatch>& pieces, double partial,
                       bool recompute_attention) {
  if (!textbook::is_chosen(options)) return kNotPredicted;
  double sum = 0;
  for (const MicroBatch& piece : pieces) {
    const Sizes z = sizes_of(options, padded, t, piece.rows);
    const textbook::GptTimes times =
        textbook::gpt_times(options, padded, z.rows);
    const BlockTable block = block_table(padded);
    const double x = all_gather(t, z.z() * z.element);
    const auto seconds = [&](const BlockPart& part) {
      return times.product(part.operations(z.s, t));
    };
    // Backward's gather overlaps the product for dX, its scatter the one for dW
    const auto column = [&](const BlockPart& part) {
      const double g = seconds(part);
      return x + g + 2 * std::max(x, g);
    };
    const auto row = [&](const BlockPart& part) {
      return 3 * seconds(part) + 2 * x;
    };
    const double attention =
        (recompute_attention ? 4.5 : 3.5) * seconds(block.attention);
    sum += z.layers * (column(block.qkv) + attention + row(block.proj) +
                       column(block.up) + row(block.down)) +
           4 * x + 3 * times.head() / t +
           3 * all_reduce(t, times.tokens * z.sum);
  }
  sum += tensor_parallel::partial_s(options, padded, t);
  return sum + all_reduce(t, partial) + all_reduce(t, 8);
}

}  // namespace

Bill megatron_bill(const Options& options, const ModelConfig& padded, int t,
                   std::int64_t micro_batches, bool recompute_attention) {
  const auto pieces = strided_micro_batches(options.batch, micro_batches);
  const Sizes z = sizes_of(options, padded, t, options.batch);
  // Per block: two gathers and two scatters forward, the same backward, and two
  // gathers for dW. One of each for the embedding and for the head.
  const double moved = (10 * z.layers + 4) * z.z() * z.element;
  // Norms, biases after a reduce_scatter, positions
  const BlockTable block = block_table(padded);
  double whole = block.norm_1.parameters() + block.norm_2.parameters();
  for (const BlockPart* rows : {&block.proj, &block.down}) {
    if (rows->bias) whole += static_cast<double>(rows->out);
  }
  whole = z.layers * whole + block.norm_1.parameters();
  if (!decoder_names(padded).positions.empty()) whole += z.positions * z.h;
  const double partial = whole * z.element;
  const double loss = 3 * z.rows * z.s * z.sum;
  const double norm = 8;
  Bill bill;
  bill.bytes = static_cast<double>(options.steps) *
               ((t - 1.0) / t * (moved + 2 * (partial + loss + norm)) +
                tensor_parallel::partial_bytes(options, padded, t));

  // Matrices are cut; norms, biases of rows and positions are whole
  bill.memory = single_device_bill(options, padded, pieces, false, t);
  if (options.steps == 0) return bill;
  bill.memory[MemoryKind::kActivation] =
      megatron_kept(options, padded, t, pieces[0].rows, recompute_attention);
  bill.step_s =
      megatron_step_s(options, padded, t, pieces, partial, recompute_attention);
  return bill;
}

}  // namespace shardbook::sequence_parallel
