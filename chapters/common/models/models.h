#pragma once

// The models of the book.
//
// Language models take token ids i64 [n, S] and return logits [n, S, V]; image
// models (resnet.h) take images [n, 3, S, S] and return logits [n, labels]. The
// loss is the mean cross-entropy over all tokens (images) of the global batch.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/common/models/block.h"
#include "chapters/common/models/llama_config.h"
#include "core/layers.h"

namespace shardbook {

/// The program whose names a file uses for a ResNet's weights.
enum class WeightNames { kTorchvision, kTransformers };

/// A config.json, and its name in messages.
struct ConfigText {
  std::string text, label;
};

/// A model's sizes: Hugging Face's GPT-2 keys; those of ResNet and of the Llama
/// family are below.
struct ModelConfig {
  /// "gpt2"; "mlp": tokens seen one by one; "resnet"; and the Llama family:
  /// "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"
  std::string type = "gpt2";
  std::int64_t vocab_size = 256;
  std::int64_t n_positions = 256;
  std::int64_t n_embd = 64;
  std::int64_t n_layer = 4;
  std::int64_t n_head = 4;
  double layer_norm_epsilon = 1e-5;
  double dropout = 0;
  GeluForm gelu = GeluForm::kTanh;  ///< activation_function
  /// Standard deviation of weights before training.
  double initializer_range = 0.02;
  /// Experts (chapter 13) replace the MLPs; their number and their gates are
  /// options of a run, not part of this.
  bool has_experts = false;
  // ResNet: Hugging Face's depths, layer_type, embedding_size, num_labels.
  std::vector<std::int64_t> depths = {2, 2, 2, 2};  ///< blocks per stage
  bool bottleneck = false;
  std::int64_t width = 64;  ///< of the stem; doubles from stage to stage
  std::int64_t num_labels = 1000;
  /// Of the Llama family (is_llama) alone.
  LlamaConfig llama = {};
  /// Of the Llama family's rows, and counted alone (counted_model.h): the planner
  /// runs its layers on shapes, and no program trains it.
  bool is_planned = false;

  /// A decoder with RMSNorm, rotary positions and SwiGLU.
  bool is_llama() const;
  /// A decoder: a table of tokens, blocks, a head.
  bool has_blocks() const { return type == "gpt2" || is_llama(); }
  /// Reads images rather than tokens.
  bool is_image() const { return type == "resnet"; }
  /// Number of possible targets: tokens of the vocabulary, or labels.
  std::int64_t num_classes() const {
    return is_image() ? num_labels : vocab_size;
  }

  /// "gpt-nano", "gpt-micro", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
  /// "gpt-1.3b", "gpt-6.7b", "gpt-13b", "gpt-175b", "mlp", "resnet18",
  /// "resnet50", "llama-nano", "llama-micro", "smollm2-135m", "llama-2-7b" and
  /// further released models of the Llama family, the text of a config
  /// ({"n_embd": ...}), or a FILE.json with the config keys of GPT-2, ResNet or
  /// that family. Throws Error that names the file, the key and what is
  /// allowed: where the model of Hugging Face with this config would compute
  /// something else, where a key is misspelt, and where there is no size.
  static ModelConfig read(const std::string& name_or_file);
  /// The text that `read` reads; empty for a preset.
  static ConfigText text_of(const std::string& name_or_file);
  /// Whether `read` knows this kind of name; programs have models of their own.
  static bool is_named(const std::string& name_or_file);
  /// From the text of a config.json; `label` names it in messages.
  static ModelConfig from_json(const std::string& text,
                               const std::string& label);
  /// As config.json, for the metadata of a saved model. `names` are the names
  /// of a ResNet's weights in the same file.
  std::string to_json(WeightNames names = WeightNames::kTorchvision) const;
};

/// Standard deviation of the last weights of a residual branch before training:
/// they begin smaller in deeper models.
double residual_stddev(const ModelConfig& config);

/// A scalar from logits and targets: the mean over their tokens (or images).
using LossFunction =
    std::function<Tensor(const Tensor& logits, const Tensor& targets)>;

/// The layers of a GPT. A chapter that shards a layer replaces it here by a
/// module with the same inputs and outputs, or with a rank's part of them; names
/// of parameters stay. After ModuleSpec of Megatron-LM
/// (core/transformer/spec_utils.py).
struct LayerFactory {
  /// The part of a block behind its second norm: [n, S, h] -> [n, S, h]. By
  /// default a GptMlp of these layers, or LlamaExperts where the config has them
  /// in this block; experts of chapter 13 replace it.
  std::function<AnyModule(const std::string& name, const ModelConfig& config,
                          const InitOptions& init, const LayerFactory& layers)>
      mlp;
  /// y = x W + b, W [in, out] from normal(0, stddev) in the stream
  /// "NAME.weight", b zeros or absent.
  std::function<AnyModule(const std::string& name, const BlockPart& part,
                          const InitOptions& init)>
      linear;
  /// Token ids [n, S] -> [n, S, width]; `rows` is the vocabulary.
  std::function<AnyModule(const std::string& name, std::int64_t rows,
                          std::int64_t width, double stddev,
                          const InitOptions& init)>
      embedding;
  /// The table of position vectors; `rows` is the number of positions.
  std::function<AnyModule(const std::string& name, std::int64_t rows,
                          std::int64_t width, double stddev,
                          const InitOptions& init)>
      position_embedding;
  /// The position table and the tokens [n, S] -> [S, width], to be added to the
  /// token vectors.
  std::function<Tensor(AnyModule& wpe, const Tensor& tokens)> positions;
  /// The angles of the positions of a sample's s tokens, as rope_table makes
  /// them: [s, head_dim]. Made once for each length.
  std::function<Tensor(const ModelConfig& config, std::int64_t s,
                       const TensorOptions& options)>
      rope_table;
  /// LayerNorm or RMSNorm.
  std::function<AnyModule(const std::string& name, const BlockPart& part,
                          double eps, const InitOptions& init)>
      norm;
  /// The ranks that share the heads of an attention, and which of them this is.
  int head_rank = 0, head_ranks = 1;
  /// Of this rank's tokens -> of all tokens that its heads read: what latent
  /// attention's heads share, [n, S, rope].
  std::function<Tensor(const Tensor& x)> for_heads;
  /// [n, S, (a + 2k) d] -> [n, S, a d], as core's; of the rank's own heads.
  std::function<Tensor(const Tensor& qkv, const AttentionOptions& options)>
      attention;
  /// After the embeddings and after both branches of a block; `attention`
  /// applies its own to the probabilities.
  std::function<AnyModule(double p)> dropout;
  /// [n, S, h] and the token embedding -> [n, S, V].
  std::function<Tensor(const Tensor& x, AnyModule& wte)> logits;
  /// The loss of logits as `logits` returns them, to be passed to training
  /// (accumulate_gradients, LanguageFeed).
  LossFunction loss;

  /// The layers of one device.
  LayerFactory();
};

/// LayerFactory::rope_table for a part of each sample: `positions` returns those of
/// its tokens, of which there are s. They are 0, 1, ... on one device.
decltype(LayerFactory::rope_table) rope_tables(
    std::function<std::vector<std::int64_t>(std::int64_t s)> positions);

/// One product for queries, keys and values, heads, and a product behind them.
/// GPT-2: c_attn [h, 3h], c_proj [h, h]. Llama: qkv_proj [h, (a + 2k) d], heads
/// that turn with their token's position, o_proj [a d, h]. Latent attention: c_attn
/// is all of latent_attention.h.
class GptAttention : public ModuleOf<GptAttention> {
 public:
  GptAttention(const std::string& name, const ModelConfig& config,
               const InitOptions& init, const LayerFactory& layers = {});
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "GptAttention"; }
  const BlockTable& block() const { return block_; }

  AnyModule c_attn, c_proj, resid_dropout;
  /// Over each head of queries, and of keys (Qwen3); empty in other models.
  std::vector<RmsNorm> head_norms;
  std::int64_t heads;
  std::int64_t kv_heads = 0;  ///< 0: as many as heads; or ranks share one
  /// This module may have only some of the model's `all_heads`.
  std::int64_t first_head = 0, all_heads;
  double attention_dropout;

 private:
  GptAttention(const std::string& name, const BlockTable& block,
               const ModelConfig& config, const InitOptions& init,
               const LayerFactory& layers);
  Tensor turned(const Tensor& qkv);

  BlockTable block_;
  /// [s, head_dim] for s tokens; empty: no rotary positions.
  std::function<Tensor(std::int64_t s, const TensorOptions&)> rope_table_;
  std::function<Tensor(const Tensor&, const AttentionOptions&)> attention_;
};

/// GPT-2: c_fc [h, 4h], GELU, c_proj [4h, h]. Llama: gate_up_proj [h, 2f],
/// silu(gate) * up, down_proj [f, h].
class GptMlp : public ModuleOf<GptMlp> {
 public:
  GptMlp(const std::string& name, const ModelConfig& config,
         const InitOptions& init, const LayerFactory& layers = {});
  /// Of the rows up, gate and down.
  GptMlp(const std::string& name, const BlockTable& block,
         const ModelConfig& config, const InitOptions& init,
         const LayerFactory& layers);
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "GptMlp"; }
  const BlockTable& block() const { return block_; }

  AnyModule c_fc, c_proj, resid_dropout;
  GeluForm gelu_form;

 private:
  BlockTable block_;
};

/// x + attn(ln_1(x)), then x + mlp(ln_2(x)), and what a shared expert adds. With
/// `recompute`, only the block's input is kept for backward.
class GptBlock : public ModuleOf<GptBlock> {
 public:
  GptBlock(const std::string& name, const ModelConfig& config,
           const InitOptions& init, const LayerFactory& layers = {});
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "GptBlock"; }

  AnyModule ln_1, ln_2;
  GptAttention attn;
  AnyModule mlp;
  std::optional<GptMlp> shared_expert;
  bool recompute = false;

 private:
  GptBlock(const std::string& name, const BlockTable& block,
           const ModelConfig& config, const InitOptions& init,
           const LayerFactory& layers);
  Tensor compute(const Tensor& x);

  BlockTable block_;
};

/// The layers before the blocks, alone: token and position embeddings. Llama has
/// no positions here: its queries and keys turn with them.
class GptEmbedding : public ModuleOf<GptEmbedding> {
 public:
  GptEmbedding(const ModelConfig& config, const InitOptions& init,
               const LayerFactory& layers = {});
  /// i64 [n, S] -> [n, S, h].
  Tensor forward(const Tensor& tokens) override;
  /// Members have their names in the whole model.
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "GptEmbedding"; }

  AnyModule wte;
  std::optional<AnyModule> wpe;
  AnyModule embd_dropout;

 private:
  DecoderNames names_;
  std::function<Tensor(AnyModule&, const Tensor&)> positions_;
};

/// The layers behind the blocks, alone: the last norm, and the output table [V, h]:
/// the token embedding once more, or one of its own. logits = ln_f(x) table^T.
class GptHead : public ModuleOf<GptHead> {
 public:
  GptHead(const ModelConfig& config, const InitOptions& init,
          const LayerFactory& layers = {});
  /// [n, S, h] -> [n, S, V].
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "GptHead"; }

  AnyModule ln_f, wte;

 private:
  DecoderNames names_;
  std::function<Tensor(const Tensor&, AnyModule&)> logits_;
};

/// A decoder, in two dialects. GPT-2 as published: pre-norm, learned positions,
/// output tied to wte; Radford et al. 2019, "Language Models are Unsupervised
/// Multitask Learners". The Llama family: RMSNorm, rotary positions, shared heads
/// of keys and values, SwiGLU; Touvron et al. 2023, "Llama 2".
class Gpt : public ModuleOf<Gpt> {
 public:
  Gpt(const ModelConfig& config, const InitOptions& init,
      const LayerFactory& layers = {});
  Tensor forward(const Tensor& tokens) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Gpt"; }

  ModelConfig config;
  GptEmbedding embedding;
  std::vector<GptBlock> h;
  AnyModule ln_f;
  std::optional<AnyModule> lm_head;  ///< where it is not the token embedding

 private:
  std::function<Tensor(const Tensor&, AnyModule&)> logits_;
};

/// Predicts each token from the one before it: an embedding and three linear
/// layers with ReLU.
class MlpModel : public ModuleOf<MlpModel> {
 public:
  MlpModel(const ModelConfig& config, const InitOptions& init);
  Tensor forward(const Tensor& tokens) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "MlpModel"; }

  Embedding wte;
  Linear fc1, fc2, fc3;
};

std::unique_ptr<Module> make_model(const ModelConfig& config,
                                   const InitOptions& init);
/// Turns recomputation on or off in every block of a GPT or ResNet.
void set_recompute(Module& model, bool on);

/// Call it with each loss that this rank computes: training looks for the first
/// rank whose loss is not finite.
void note_local_loss(const Tensor& loss);

/// The loss of one device: mean of the cross-entropy of logits [n, S, V] against
/// [n, S], or of [n, labels] against [n].
Tensor language_loss(const Tensor& logits, const Tensor& targets);

}  // namespace shardbook
