#pragma once

// A decoder's block as a table: a row for each part, in the order of the forward.
// GPT-2 and the Llama family differ in their rows alone. Everything that follows
// from a block's sizes is read from here: its modules (models.h), its parameters,
// the activations that it keeps (run/kept.h), and how tensor parallelism cuts it
// (07_tensor_parallel).
//
//   double parameters = 0;
//   for (const BlockPart& part : block_table(config).parts()) {
//     parameters += part.parameters();
//   }

#include <cstdint>
#include <string>
#include <vector>

#include "core/shards.h"

namespace shardbook {

struct ModelConfig;

enum class PartKind {
  kLayerNorm,
  kRmsNorm,
  kProduct,
  kAttention,
  kGelu,
  kSwiglu,
  kTable  ///< rows of `out` elements, `in` of them: tokens, positions
};

/// How t ranks of tensor parallelism share a product's weight [in, out]; a layer
/// that is cut by columns hands its part to one that is cut by rows.
enum class Cut { kWhole, kColumns, kRows };

/// One part. Widths are elements per token.
struct BlockPart {
  /// Behind the block's name: "attn.c_attn"; empty without weights.
  std::string name = {};
  PartKind kind = PartKind::kProduct;
  std::int64_t in = 0, out = 0;
  bool bias = false;
  Cut cut = Cut::kWhole;
  /// What lies side by side, each of which is cut alone: queries, keys and values
  /// in attention's `in` and in the `out` of the product in front of it, gate and
  /// up. Ranks that outnumber the heads of keys share them. Empty: one.
  std::vector<Columns> columns = {};
  /// Of attention; of a norm: it normalises each of so many heads alone.
  std::int64_t heads = 1;
  /// Standard deviation of the weight before training.
  double stddev = 0;
  /// Weights of this size that lie on each other, of which a token passes through
  /// so many. Such weights have no cut.
  std::int64_t experts = 1, chosen = 1;
  /// Its input is that of a product in front of it, which keeps it.
  bool shares_input = false;
  /// Of attention: a token sees at most this many, with itself; 0: all before it.
  std::int64_t window = 0;
  /// The window does not slide: tokens see no further than their own piece of
  /// `window` tokens.
  bool in_chunks = false;
  /// Each head of attention has a logit of its own that no token has.
  bool has_sinks = false;

  /// Behind that of its module: "c_attn".
  std::string leaf() const { return name.substr(name.rfind('.') + 1); }
  bool is_norm() const {
    return kind == PartKind::kLayerNorm || kind == PartKind::kRmsNorm;
  }
  /// Width of `out` on each of t ranks.
  double out_on(double t) const;
  /// Parameters of each of t ranks. A weight cut by rows has a whole bias: it is
  /// added behind the sum.
  double parameters(double t = 1) const;
  /// Elements per token that the part keeps for its backward: its input. Experts
  /// have further rows of zeros, which depend on the tokens' choices.
  double kept(double t = 1) const;
  /// Statistics per token that it keeps in f32 (f64 for f64): a norm's mean and
  /// deviation (RMSNorm: the latter), a logarithm per head of attention.
  double statistics(double t = 1) const;
  /// Tokens that a token of a sample of `seq` sees, on average: (seq + 1) / 2
  /// without a window.
  double seen(double seq) const;
  /// Operations per token of a forward, on samples of `seq` tokens: a product's
  /// two per weight, and attention's two products over the tokens seen.
  double operations(double seq, double t = 1) const;
  /// Of a backward: two products for each one, five for the two of attention.
  double backward_operations(double seq, double t = 1) const;
  /// Elements per token that a deferred weight gradient needs: a product's input
  /// and the gradient of its output.
  double deferred(double t = 1) const;
};

/// Queries, keys and values of latent attention (MLA): products into a narrow
/// latent vector, a norm, and products out of it by heads.
///
///   x --q_a--> [q_rank] --norm--> q_b --> a heads of [rope | nope]
///   x --kv_a-> [rope | kv_rank] --norm--> kv_b --> a heads of [nope | value]
///                 one for all heads
///
/// The rope columns turn with the token's position. DeepSeek-AI 2024,
/// "DeepSeek-V2", section 2.1.
struct LatentSizes {
  std::int64_t hidden = 0, heads = 0;
  std::int64_t q_rank = 0;  ///< 0: queries come from x
  std::int64_t kv_rank = 0, rope = 0, nope = 0, value = 0;
  bool bias = false;  ///< of the products from x
  double stddev = 0;
};
/// Its rows, the last of which is attention. Tensor parallelism cuts what comes
/// out by heads, and leaves whole what goes in. In memory, q_b's columns are all
/// heads' rope, then all heads' nope, and kv_b's likewise.
std::vector<BlockPart> latent_parts(const LatentSizes& sizes);

/// x + proj(attention(qkv(norm_1(x)))), then x + down(gate(up(norm_2(x)))). In a
/// block with experts up, gate and down are each expert's.
struct BlockTable {
  std::string attention_module, mlp_module;  ///< "attn", "mlp"
  BlockPart norm_1, qkv;
  /// In place of qkv; empty in other models.
  std::vector<BlockPart> latent;
  /// Of queries and of keys, before they turn (Qwen3); empty in other models.
  std::vector<BlockPart> head_norms;
  BlockPart attention, proj, norm_2;
  /// From a token to a logit for each expert; empty in dense blocks.
  std::vector<BlockPart> router;
  BlockPart up, gate, down;
  /// A gated MLP beside the experts, which sees all tokens: its up, gate and down.
  std::vector<BlockPart> shared;

  std::vector<BlockPart> parts() const;
  /// Those of `shared`, as an MLP.
  BlockTable of_shared() const;
};

/// Of a GPT-2, or of a dense block of the Llama family.
BlockTable block_table(const ModelConfig& config);
/// Of this block, which may have experts (Mixtral, Qwen3-MoE). Their weights are
/// called as in llama_experts.h.
BlockTable block_table(const ModelConfig& config, std::int64_t block);
/// BlockTable::shared, of any block that has it.
std::vector<BlockPart> shared_expert_parts(const ModelConfig& config);
/// The index in a name of a block, or of a module of it: 3 of
/// "model.layers.3.mlp". Throws Error where the model has no such block.
std::int64_t block_of(const ModelConfig& config, const std::string& name);

/// The names of a decoder's other layers.
struct DecoderNames {
  std::string table, positions, blocks, norm;
  std::string head;  ///< empty where the token table is the output layer, too
  /// The table of the output layer.
  const std::string& output() const { return head.empty() ? table : head; }
  /// "transformer.h.3"
  std::string block(std::int64_t index) const {
    return blocks + "." + std::to_string(index);
  }
};
DecoderNames decoder_names(const ModelConfig& config);

}  // namespace shardbook
