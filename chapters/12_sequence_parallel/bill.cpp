#include "chapters/12_sequence_parallel/bill.h"

#include <algorithm>
#include <vector>

#include "chapters/common/run/training.h"

namespace shardbook::sequence_parallel {
namespace {

struct Sizes {
  double c, rows, s, h, heads, layers, vocabulary, parameters;
  double element, sum;  // bytes of an element, and of one of a sum
  double z() const { return rows * s * h; }
};

Sizes sizes_of(const Options& options, const ModelConfig& config, int c,
               std::int64_t num_parameters, std::int64_t rows) {
  Sizes sizes;
  sizes.c = c;
  sizes.rows = static_cast<double>(rows);
  sizes.s = static_cast<double>(options.seq);
  sizes.h = static_cast<double>(config.n_embd);
  sizes.heads = static_cast<double>(config.n_head);
  sizes.layers = static_cast<double>(config.n_layer);
  sizes.vocabulary = static_cast<double>(config.vocab_size);
  sizes.parameters = static_cast<double>(num_parameters);
  sizes.element = static_cast<double>(dtype_bytes(options.dtype));
  sizes.sum = options.dtype == DType::kF64 ? 8 : 4;
  return sizes;
}

/// Buffers of attention that travel: the most at one time.
double travelling_bytes(const Sizes& z, const SequenceOptions& how, int rank) {
  const double own = z.z() / z.c;
  const double blocks = std::min(z.c - 1, 2.0);  // here, and on its way
  switch (how.kind) {
    case Kind::kUlysses:
      // A buffer is sent, and another one is received
      return 2 * own * z.element;
    case Kind::kRsa:
      return std::max(blocks * own, how.all_reduce ? 0 : z.z()) * z.element;
    default: {
      // K and V; dK and dV of this block, of the one that left, of the one that
      // arrives. Rank 0 of contiguous slices has no block but its own to add.
      const bool adds = how.layout != Layout::kContiguous || rank > 0;
      return 2 * own * (blocks * z.element + (adds ? 3 : 2) * z.sum);
    }
  }
}

// Activations of RSA: rows of scores are kept beside what one device keeps, in
// elements per token; with dropout twice, before and after it. See
// chapters/common/run/memory.cpp for the other 16 h, and for the gradients that
// a later micro-batch holds beside the accumulated ones.
double rsa_activations(const Sizes& z, bool has_dropout, bool is_later) {
  const double scalars = 2 * z.sum;
  const double tokens = z.rows * z.s / z.c;
  const double rows = z.heads * z.s;  // of scores, of all heads of a token
  const double drops = has_dropout ? 1 : 0;
  const double block =
      tokens * ((16 * z.h + (1 + drops) * rows) * z.element + 4 * z.sum);
  const double in_blocks = z.layers * block;
  const double head = is_later ? z.vocabulary * z.h * z.element : 0;
  const double c_proj = is_later ? (4 * z.h + 1) * z.h * z.element : 0;
  const double at_loss =
      in_blocks + tokens * (2 * (z.h + z.vocabulary) * z.element + 3 * z.sum) +
      scalars;
  const double at_head =
      in_blocks + tokens * ((3 * z.h + z.vocabulary) * z.element + 2 * z.sum) +
      scalars + head;
  const double at_gelu = in_blocks + tokens * (5 + drops) * z.h * z.element +
                         scalars + head + c_proj;
  // In the last block's ring_av: x, ln_1, q, k, v, the gradients of the residual
  // stream and of the output, and weights, dP in blocks, and dP whole
  const double before = in_blocks - block +
                        tokens * (7 * z.h * z.element + 2 * z.sum) + scalars +
                        head;
  const double at_rows = before + tokens * (3 + drops) * rows * z.element;
  // Then dV of all s tokens, and this rank's
  const double at_sum =
      before + tokens * ((2 + drops) * rows + (z.c + 1) * z.h) * z.element;
  const double at_end = tokens * z.h * z.element + 2 * head + scalars;
  // Before the loss, in the last block's ring_av: x, ln_1, q, k and v in three
  // layouts, the sum and a part of it; scores, weights, and columns of one rank
  const double at_weighing =
      in_blocks - block +
      tokens *
          ((13 * z.h + (2 + drops + 1 / z.c) * rows) * z.element + 2 * z.sum);
  return std::max(
      {at_loss, at_head, at_gelu, at_rows, at_sum, at_end, at_weighing});
}

// Activations of one micro-batch, the first of a step or a later one.
double activations_of(const Options& own, const ModelConfig& config,
                      const SequenceOptions& how, const Sizes& z,
                      bool is_later) {
  if (how.kind == Kind::kRsa) {
    return rsa_activations(z, own.dropout > 0, is_later);
  }
  MemoryBill bill =
      single_device_bill(own, config, static_cast<std::int64_t>(z.rows),
                         /*recompute=*/false, /*accumulates=*/is_later);
  // Ulysses: the output of attention by heads, beside the same by tokens
  const double by_heads = how.kind == Kind::kUlysses ? z.z() / z.c : 0;
  return bill[MemoryKind::kActivation] + z.layers * by_heads * z.element;
}

// Activations of Megatron's layers on t > 1 ranks, of one micro-batch. All tokens'
// input of a column-parallel layer is x bytes, and a rank's own is x / t.
double megatron_activations(const Sizes& z, bool keeps_scores, bool has_dropout,
                            bool is_later) {
  const double t = z.c, tokens = z.rows * z.s;
  const double x = z.z() * z.element, own = x / t;
  const double scalars = 2 * z.sum;
  // As on one device, on own tokens or own heads (chapters/common/run/memory.cpp)
  const double block =
      16 * own + tokens / t * (4 + (keeps_scores ? z.heads : 0)) * z.sum;
  const double blocks = z.layers * block;
  const double logits = tokens * z.vocabulary / t * z.element;
  // Of later micro-batches, beside the accumulated ones
  const double head = is_later ? z.vocabulary * z.h / t * z.element : 0;
  const double matrix = is_later ? 4 * z.h * z.h / t * z.element : 0;

  // Beside the input of ln_f and its statistics: the head's gathered input, ...
  const double tail = blocks + own + tokens / t * 2 * z.sum + scalars;
  const double at_loss = tail + x + 2 * logits + tokens * z.sum;
  const double at_head = tail + 2 * x + logits + head;
  // ... whose gradient is put in the order of ranks, and scattered. One row of
  // tokens is in order as it is
  const double ordered = z.rows > 1 ? x : 0;
  const double at_scatter = tail + x + ordered + own + head;
  // c_proj: dy gathered and put in order, and then its product with the matrix
  const double drops = has_dropout ? own : 0;
  const double at_gather = blocks + own + drops + x + ordered + scalars + head;
  const double at_c_proj = blocks + 5 * own + x + matrix + scalars + head;
  // c_fc, whose output and GELU's are gone: dy of it and of the residual stream,
  // the gradient of its input, the input gathered and put in order
  const double at_c_fc = blocks - 3 * own + 3 * x + scalars + head;
  // Then the gradient in the order of ranks, and scattered, and that of weights
  const double at_dw = blocks - 2 * own + 2 * x + matrix + scalars + head;
  // The embedding: dy gathered and put in order, or its table's gradient
  const double at_end = x + std::max(own + ordered + head, 2 * head) + scalars;
  return std::max({at_loss, at_head, at_scatter, at_gather, at_c_proj, at_c_fc,
                   at_dw, at_end});
}

}  // namespace

LayerElements layer_elements(const SequenceOptions& how, double c, double z,
                             double kv_share) {
  const double part = (c - 1) / c * z;
  switch (how.kind) {
    case Kind::kUlysses:
      // Q and O, K and V: all-to-alls of z / c
      return {(2 + 2 * kv_share) * part / c, (2 + 2 * kv_share) * part / c, 0};
    case Kind::kRsa:
      return {2 * part, (how.all_reduce ? 6 : 4) * part, 0};
    default:
      // K and V make c - 1 hops, dK and dV one more
      return {2 * part * kv_share, 2 * part * kv_share, 2 * z * kv_share};
  }
}

double predicted_bytes(const Options& options, const ModelConfig& config,
                       const SequenceOptions& how, int c,
                       std::int64_t num_parameters,
                       std::int64_t micro_batches) {
  if (c == 1) return 0;
  const Sizes z = sizes_of(options, config, c, num_parameters, options.batch);
  const LayerElements layer = layer_elements(how, z.c, z.z());
  const double attention =
      z.layers * ((layer.forward + layer.backward) * z.element +
                  layer.backward_sums * z.sum);
  const double losses = static_cast<double>(micro_batches) * 2 * z.sum;
  const double norm = 8;
  const double all_reduced = z.parameters * z.element + losses + norm;
  return static_cast<double>(options.steps) *
         (attention + 2 * (z.c - 1) / z.c * all_reduced);
}

MemoryBill predicted_memory(const Options& options, const ModelConfig& config,
                            const SequenceOptions& how, int c, int rank,
                            std::int64_t num_parameters,
                            std::int64_t micro_batches) {
  // One device with the rank's tokens
  Options own = options;
  own.seq = options.seq / c;
  const std::vector<MicroBatch> pieces =
      strided_micro_batches(options.batch, micro_batches);
  MemoryBill bill = single_device_bill(own, config, pieces);
  if (c == 1 || options.steps == 0) {
    if (options.steps > 0) bill[MemoryKind::kCommunication] = 8;
    return bill;
  }
  Sizes z = sizes_of(options, config, c, num_parameters, pieces[0].rows);

  // Ids of all tokens, and those of this rank; zigzag also holds two halves
  const double ids = z.rows * z.s * 8;
  bill[MemoryKind::kInput] =
      2 * ids + (how.layout == Layout::kZigzag ? 3 : 2) * ids / z.c;
  if (how.kind == Kind::kRsa) {
    bill[MemoryKind::kInput] += z.s / z.c * z.s * z.element;  // the mask
  }
  bill[MemoryKind::kCommunication] =
      std::max(z.parameters * z.element, travelling_bytes(z, how, rank));

  double& activations = bill[MemoryKind::kActivation];
  activations = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    z.rows = static_cast<double>(pieces[i].rows);
    activations =
        std::max(activations, activations_of(own, config, how, z, i > 0));
  }
  return bill;
}

namespace {

/// Of all micro-batches of a step.
double megatron_activations(const Options& options, const ModelConfig& padded,
                            int t, std::int64_t micro_batches,
                            bool recompute_attention) {
  const auto pieces = strided_micro_batches(options.batch, micro_batches);
  if (t == 1) {
    // One device's, that keeps no logarithms of the softmax's sums
    ModelConfig config = padded;
    if (recompute_attention) config.n_head = 0;
    return single_device_bill(options, config, pieces)[MemoryKind::kActivation];
  }
  double peak = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Sizes sizes = sizes_of(options, padded, t, 0, pieces[i].rows);
    peak = std::max(peak, megatron_activations(sizes, !recompute_attention,
                                               options.dropout > 0, i > 0));
  }
  return peak;
}

}  // namespace

Bill megatron_bill(const Options& options, const ModelConfig& padded, int t,
                   std::int64_t micro_batches, bool recompute_attention) {
  const double p = t;
  const auto tokens = static_cast<double>(options.batch * options.seq);
  const auto element = static_cast<double>(dtype_bytes(options.dtype));
  const double sum = options.dtype == DType::kF64 ? 8 : 4;
  const auto h = static_cast<double>(padded.n_embd);
  const auto layers = static_cast<double>(padded.n_layer);
  const auto vocabulary = static_cast<double>(padded.vocab_size);
  const auto positions = static_cast<double>(padded.n_positions);

  // Per block: two gathers and two scatters forward, the same backward, and two
  // gathers for dW. One of each for the embedding and for the head.
  const double moved = (10 * layers + 4) * tokens * h * element;
  // LayerNorms, biases behind a reduce_scatter, positions
  const double partial = ((6 * layers + 2) * h + positions * h) * element;
  const double loss = 3 * tokens * sum;
  const double norm = 8;
  Bill bill;
  bill.bytes = static_cast<double>(options.steps) * (p - 1) / p *
               (moved + 2 * (partial + loss + norm));

  // Matrices are cut; LayerNorms, biases of rows and positions are whole
  MemoryBill& memory = bill.memory;
  const double cut = layers * (12 * h * h + 7 * h) + vocabulary * h;
  const double whole = layers * 6 * h + 2 * h + positions * h;
  const double held = cut / p + whole;
  memory[MemoryKind::kParameter] = held * element;
  memory[MemoryKind::kGradient] = 0;
  memory[MemoryKind::kOptimizerState] = 0;
  memory[MemoryKind::kInput] = 0;
  memory[MemoryKind::kCommunication] = 0;
  if (options.steps == 0) {
    memory[MemoryKind::kActivation] = 0;
    return bill;
  }
  memory[MemoryKind::kGradient] = (held + vocabulary * h / p) * element;
  memory[MemoryKind::kOptimizerState] = optimizer_states(options) * held * sum;
  const std::int64_t rows =
      strided_micro_batches(options.batch, micro_batches)[0].rows;
  memory[MemoryKind::kInput] = static_cast<double>(rows * options.seq) * 16;
  memory[MemoryKind::kCommunication] = t > 1 ? std::max(partial, 8.0) : 8;
  memory[MemoryKind::kActivation] = megatron_activations(
      options, padded, t, micro_batches, recompute_attention);
  return bill;
}

}  // namespace shardbook::sequence_parallel
