#pragma once

// Closed forms of a step on the cluster `textbook`: a product takes its
// operations over one rate, a message latency plus bytes over bandwidth, and
// nothing else takes time (sim/clusters/textbook.json). A chapter's bill writes a
// step down in these terms; the report compares it with the virtual clock.

#include <cmath>

#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"

namespace shardbook::textbook {

constexpr double kRate = 1e14;       // operations per second
constexpr double kLatency = 5e-6;    // seconds
constexpr double kBandwidth = 1e11;  // bytes per second

inline bool is_chosen(const Options& options) {
  return options.cluster == "textbook";
}

// Seconds, where `bytes` are those of the whole tensor.
inline double message(double bytes) { return kLatency + bytes / kBandwidth; }
inline double all_gather(double n, double bytes) {
  return (n - 1) * (kLatency + bytes / n / kBandwidth);
}
inline double reduce_scatter(double n, double bytes) {
  return all_gather(n, bytes);
}
inline double all_reduce(double n, double bytes) {
  return reduce_scatter(n, bytes) + all_gather(n, bytes);
}
/// Along a tree; a reduce takes as long.
inline double broadcast(double n, double bytes) {
  return n == 1 ? 0 : std::ceil(std::log2(n)) * message(bytes);
}

/// A decoder's parts for one micro-batch, whose products t ranks share. Backward
/// has two products for each one, and five for the two of attention.
struct GptTimes {
  double tokens = 0, seq = 0, h = 0, vocabulary = 0, t = 1;
  /// Operations per token of a block's products, and of its attention.
  double of_products = 0, of_attention = 0;

  double product(double operations_per_token) const {
    return operations_per_token * tokens / t / kRate;
  }
  /// Causal: a token attends to (seq + 1) / 2 tokens on average.
  double attention() const { return product(of_attention); }
  /// Products of a block, except attention's own.
  double dense() const { return product(of_products); }
  double block_forward() const { return dense() + attention(); }
  double block_backward() const { return 2 * dense() + 2.5 * attention(); }
  /// The product of the head; backward takes twice as long.
  double head() const { return product(2 * h * vocabulary); }
};
/// For `rows` samples.
inline GptTimes gpt_times(const Options& options, const ModelConfig& config,
                          double rows) {
  const auto seq = static_cast<double>(options.seq);
  GptTimes times{rows * seq, seq, static_cast<double>(config.n_embd),
                 static_cast<double>(config.vocab_size)};
  for (const BlockPart& part : block_table(config).parts()) {
    (part.kind == PartKind::kProduct ? times.of_products
                                     : times.of_attention) +=
        part.operations(seq);
  }
  return times;
}

/// A model, for one micro-batch: layers of equal work, and a head behind them. A
/// GPT's layers are its blocks; the mlp has three, and no head. Where ranks share
/// its layers, the embedding in front takes time, too.
struct ModelTimes {
  double layers = 0, layer_forward = 0, layer_backward = 0;
  double head = 0, head_backward = 0;
  double embedding = 0, embedding_backward = 0;

  double forward() const { return embedding + layers * layer_forward + head; }
  double backward() const {
    return head_backward + layers * layer_backward + embedding_backward;
  }
};
/// The cluster and the model have the times below.
inline bool has_model_times(const Options& options, const ModelConfig& config) {
  const bool has_equal_layers =
      (config.has_blocks() && !config.has_experts &&
       config.llama.num_experts == 0) ||
      (config.type == "mlp" && config.vocab_size == 4 * config.n_embd);
  return is_chosen(options) && has_equal_layers;
}
/// For `rows` samples; with `recompute`, backward repeats a block's forward.
inline ModelTimes model_times(const Options& options, const ModelConfig& config,
                              double rows, bool recompute = false) {
  const GptTimes gpt = gpt_times(options, config, rows);
  if (config.type == "mlp") {
    const double forward = gpt.product(8 * gpt.h * gpt.h);
    return {3, forward, 2 * forward};
  }
  const double forward = gpt.block_forward();
  return {static_cast<double>(config.n_layer), forward,
          gpt.block_backward() + (recompute ? forward : 0), gpt.head(),
          2 * gpt.head()};
}

}  // namespace shardbook::textbook
