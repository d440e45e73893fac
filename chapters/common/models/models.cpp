#include "chapters/common/models/models.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <typeinfo>
#include <utility>

#include "chapters/common/models/latent_attention.h"
#include "chapters/common/models/llama_experts.h"
#include "chapters/common/models/resnet.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/marks.h"
#include "core/rope.h"

namespace shardbook {

double residual_stddev(const ModelConfig& config) {
  return config.initializer_range /
         std::sqrt(2.0 * static_cast<double>(config.n_layer));
}

// --- GPT ---------------------------------------------------------------------

namespace {

using Positions = std::function<std::vector<std::int64_t>(std::int64_t s)>;

/// The tables of one model's blocks, by length.
class RopeTables {
 public:
  explicit RopeTables(Positions positions) : positions_(std::move(positions)) {}

  /// Replicas on several devices may ask at the same time.
  Tensor of(const ModelConfig& config, std::int64_t s,
            const TensorOptions& options) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Tensor& table : tables_) {
      if (table.size(0) == s && table.dtype() == options.dtype &&
          table.device() == options.device) {
        return table;
      }
    }
    const std::vector<std::int64_t> positions = positions_(s);
    SB_CHECK(s > 0 && static_cast<std::int64_t>(positions.size()) == s,
             "rope_tables: ", positions.size(), " positions for ", s,
             " tokens");
    check_sequence(config,
                   1 + *std::max_element(positions.begin(), positions.end()));
    const MemoryScope kind(MemoryKind::kInput);
    const LlamaConfig& llama = config.llama;
    tables_.push_back(shardbook::rope_table(
        positions, llama.rope_width(), llama.rope_theta, llama.rope, options));
    return tables_.back();
  }

 private:
  Positions positions_;
  std::mutex mutex_;
  Tensors tables_;
};

}  // namespace

decltype(LayerFactory::rope_table) rope_tables(Positions positions) {
  return [tables = std::make_shared<RopeTables>(std::move(positions))](
             const ModelConfig& config, std::int64_t s,
             const TensorOptions& options) {
    return tables->of(config, s, options);
  };
}

LayerFactory::LayerFactory() {
  mlp = [](const std::string& name, const ModelConfig& config,
           const InitOptions& init, const LayerFactory& layers) -> AnyModule {
    if (config.llama.num_experts > 0 &&
        config.llama.has_experts_in(block_of(config, name))) {
      return {std::make_unique<LlamaExperts>(name, config, init)};
    }
    return {std::make_unique<GptMlp>(name, config, init, layers)};
  };
  linear = [](const std::string& name, const BlockPart& part,
              const InitOptions& init) -> AnyModule {
    auto made = std::make_unique<Linear>();
    made->weight = make_parameter(name + ".weight", {part.in, part.out},
                                  part.stddev, init);
    if (part.bias) made->bias = make_constant_parameter({part.out}, 0, init);
    return {std::move(made)};
  };
  embedding = [](const std::string& name, std::int64_t rows, std::int64_t width,
                 double stddev, const InitOptions& init) -> AnyModule {
    return {std::make_unique<Embedding>(name, rows, width, init, stddev)};
  };
  position_embedding = embedding;
  positions = [](AnyModule& wpe, const Tensor& tokens) {
    const Tensor& weight = wpe.as<Embedding>().weight;
    const std::int64_t s = tokens.size(-1), positions = weight.size(0);
    SB_CHECK(s <= positions, "gpt: ", s, " tokens, the model has ", positions,
             " positions");
    return slice(weight, 0, 0, s);
  };
  rope_table = rope_tables([](std::int64_t s) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(s));
    std::iota(all.begin(), all.end(), 0);
    return all;
  });
  norm = [](const std::string&, const BlockPart& part, double eps,
            const InitOptions& init) -> AnyModule {
    if (part.kind == PartKind::kRmsNorm) {
      return {std::make_unique<RmsNorm>(part.out, init, eps)};
    }
    return {std::make_unique<LayerNorm>(part.out, init, eps)};
  };
  for_heads = [](const Tensor& x) { return x; };
  attention = [](const Tensor& qkv, const AttentionOptions& options) {
    return shardbook::attention(qkv, options);
  };
  dropout = [](double p) -> AnyModule {
    return {std::make_unique<Dropout>(p)};
  };
  // The token embedding once more: logits = x wte^T
  logits = [](const Tensor& x, AnyModule& wte) {
    const Tensor& weight = wte.as<Embedding>().weight;
    const Tensor rows = reshape(x, {-1, weight.size(1)});
    return reshape(matmul(rows, weight, false, true),
                   {x.size(0), x.size(1), weight.size(0)});
  };
  loss = language_loss;
}

GptAttention::GptAttention(const std::string& name, const ModelConfig& config,
                           const InitOptions& init, const LayerFactory& layers)
    : GptAttention(name, block_table(config), config, init, layers) {}

GptAttention::GptAttention(const std::string& name, const BlockTable& block,
                           const ModelConfig& config, const InitOptions& init,
                           const LayerFactory& layers)
    : c_attn(
          config.llama.is_latent()
              ? latent_products(name, block, config, init, layers)
              : layers.linear(name + "." + block.qkv.leaf(), block.qkv, init)),
      c_proj(layers.linear(name + "." + block.proj.leaf(), block.proj, init)),
      resid_dropout(layers.dropout(config.dropout)),
      heads(config.n_head / layers.head_ranks),
      first_head(layers.head_rank * heads),
      all_heads(config.n_head),
      attention_dropout(config.dropout),
      block_(block),
      attention_(layers.attention) {
  SB_CHECK(config.n_head % layers.head_ranks == 0, "attention: ", config.n_head,
           " heads do not divide over ", layers.head_ranks, " ranks; give ",
           (heads + 1) * layers.head_ranks);
  if (!config.is_llama()) return;
  // Where ranks outnumber the heads of keys, neighbours share one
  kv_heads =
      std::max<std::int64_t>(config.llama.kv_heads / layers.head_ranks, 1);
  if (config.llama.is_latent()) return;  // they have turned
  while (head_norms.size() < block.head_norms.size()) {
    head_norms.emplace_back(config.llama.head_dim, init,
                            config.layer_norm_epsilon);
  }
  rope_table_ = [config, table = layers.rope_table](
                    std::int64_t s, const TensorOptions& options) {
    return table(config, s, options);
  };
}

// [q | k | v], with the heads of q and k normalised where the model does so, and
// turned to their token's position.
Tensor GptAttention::turned(const Tensor& qkv) {
  const Tensor table = rope_table_(qkv.size(1), qkv.options());
  const std::int64_t d = table.size(1);
  Tensor all = qkv;
  if (!head_norms.empty()) {
    const Shape by_head = {qkv.size(0), qkv.size(1), -1, d};
    Tensors parts;
    std::int64_t first = 0;
    for (RmsNorm& norm : head_norms) {
      const std::int64_t end = first + (parts.empty() ? heads : kv_heads) * d;
      const Tensor part = slice(qkv, 2, first, end);
      parts.push_back(reshape(norm(reshape(part, by_head)), part.shape()));
      first = end;
    }
    parts.push_back(slice(qkv, 2, first, qkv.size(2)));
    all = concat(parts, 2);
  }
  return set_mark(rope(all, table, heads + kv_heads, d), mark_of(qkv));
}

Tensor GptAttention::forward(const Tensor& x) {
  const Tensor qkv = rope_table_ ? turned(c_attn(x)) : c_attn(x);
  AttentionOptions options;
  options.heads = heads;
  options.kv_heads = kv_heads;
  if (!block_.latent.empty()) {
    options.value_dim = block_.attention.out / all_heads;
  }
  options.dropout = is_training() ? attention_dropout : 0;
  if (heads != all_heads) {
    // Dropout draws for these heads as one device draws for them
    const std::int64_t s = qkv.size(1);
    options.shard = {{qkv.size(0), all_heads, s, s}, {0, first_head, 0, 0}, {}};
  }
  return resid_dropout(c_proj(attention_(qkv, options)));
}

void GptAttention::members(MemberVisitor& visit) {
  if (block_.latent.empty()) {
    visit.module(block_.qkv.leaf(), *c_attn);
  } else {
    (*c_attn).members(visit);
  }
  for (std::size_t i = 0; i < head_norms.size(); ++i) {
    visit.module(block_.head_norms[i].leaf(), head_norms[i]);
  }
  visit.module(block_.proj.leaf(), *c_proj);
  visit.module("resid_dropout", *resid_dropout);
}

GptMlp::GptMlp(const std::string& name, const ModelConfig& config,
               const InitOptions& init, const LayerFactory& layers)
    : GptMlp(name, block_table(config), config, init, layers) {}

GptMlp::GptMlp(const std::string& name, const BlockTable& block,
               const ModelConfig& config, const InitOptions& init,
               const LayerFactory& layers)
    : c_fc(layers.linear(name + "." + block.up.leaf(), block.up, init)),
      c_proj(layers.linear(name + "." + block.down.leaf(), block.down, init)),
      resid_dropout(layers.dropout(config.dropout)),
      gelu_form(config.gelu),
      block_(block) {}

namespace {

constexpr char kSharedExpert[] = "mlp.shared_experts";

/// The layer as core's Linear; null where a chapter replaces it, or where its
/// hooks must see its input and output.
const Linear* plain_linear(const AnyModule& layer) {
  const Module& module = *layer;
  const bool is_plain = typeid(module) == typeid(Linear) && !module.has_hooks();
  return is_plain ? &layer.as<Linear>() : nullptr;
}

}  // namespace

Tensor GptMlp::forward(const Tensor& x) {
  if (block_.gate.kind == PartKind::kSwiglu) {
    return resid_dropout(c_proj(swiglu(c_fc(x))));
  }
  const Linear *fc = plain_linear(c_fc), *proj = plain_linear(c_proj);
  if (fc == nullptr || proj == nullptr) {
    return resid_dropout(c_proj(gelu(c_fc(x), gelu_form)));
  }
  return resid_dropout(
      gelu_mlp(x, fc->weight, fc->bias, proj->weight, proj->bias, gelu_form));
}

void GptMlp::members(MemberVisitor& visit) {
  visit.module(block_.up.leaf(), *c_fc);
  visit.module(block_.down.leaf(), *c_proj);
  visit.module("resid_dropout", *resid_dropout);
}

GptBlock::GptBlock(const std::string& name, const ModelConfig& config,
                   const InitOptions& init, const LayerFactory& layers)
    : GptBlock(name, block_table(config), config, init, layers) {}

GptBlock::GptBlock(const std::string& name, const BlockTable& block,
                   const ModelConfig& config, const InitOptions& init,
                   const LayerFactory& layers)
    : ln_1(layers.norm(name + "." + block.norm_1.name, block.norm_1,
                       config.layer_norm_epsilon, init)),
      ln_2(layers.norm(name + "." + block.norm_2.name, block.norm_2,
                       config.layer_norm_epsilon, init)),
      attn(name + "." + block.attention_module, config, init, layers),
      mlp(layers.mlp(name + "." + block.mlp_module, config, init, layers)),
      block_(block) {
  if (config.llama.shared_intermediate_size == 0) return;
  const BlockTable own = block_table(config, block_of(config, name));
  if (own.shared.empty()) return;
  shared_expert.emplace(name + "." + kSharedExpert, own.of_shared(), config,
                        init, layers);
}

Tensor GptBlock::compute(const Tensor& x) {
  const Tensor y = add(x, attn(ln_1(x))), z = ln_2(y), sum = add(y, mlp(z));
  return shared_expert ? add(sum, (*shared_expert)(z)) : sum;
}

Tensor GptBlock::forward(const Tensor& x) {
  if (!recompute) return compute(x);
  return autograd::recompute(
      [this](const Tensors& inputs) { return Tensors{compute(inputs[0])}; },
      {x})[0];
}

void GptBlock::members(MemberVisitor& visit) {
  visit.module(block_.norm_1.name, *ln_1);
  visit.module(block_.attention_module, attn);
  visit.module(block_.norm_2.name, *ln_2);
  visit.module(block_.mlp_module, *mlp);
  if (shared_expert) visit.module(kSharedExpert, *shared_expert);
}

namespace {

AnyModule table(const std::string& name, const ModelConfig& config,
                const InitOptions& init, const LayerFactory& layers) {
  return layers.embedding(name, config.vocab_size, config.n_embd,
                          config.initializer_range, init);
}

AnyModule last_norm(const ModelConfig& config, const InitOptions& init,
                    const LayerFactory& layers) {
  return layers.norm(decoder_names(config).norm, block_table(config).norm_1,
                     config.layer_norm_epsilon, init);
}

}  // namespace

GptEmbedding::GptEmbedding(const ModelConfig& config, const InitOptions& init,
                           const LayerFactory& layers)
    : wte(table(decoder_names(config).table, config, init, layers)),
      embd_dropout(layers.dropout(config.dropout)),
      names_(decoder_names(config)),
      positions_(layers.positions) {
  if (names_.positions.empty()) return;
  wpe =
      layers.position_embedding(names_.positions, config.n_positions,
                                config.n_embd, config.initializer_range, init);
}

Tensor GptEmbedding::forward(const Tensor& tokens) {
  // In two statements: their order decides the order of backward.
  const Tensor token_vectors = wte(tokens);
  return embd_dropout(wpe ? add(token_vectors, positions_(*wpe, tokens))
                          : token_vectors);
}

void GptEmbedding::members(MemberVisitor& visit) {
  visit.module(names_.table, *wte);
  if (wpe) visit.module(names_.positions, **wpe);
  visit.module("transformer.embd_dropout", *embd_dropout);
}

GptHead::GptHead(const ModelConfig& config, const InitOptions& init,
                 const LayerFactory& layers)
    : ln_f(last_norm(config, init, layers)),
      wte(table(decoder_names(config).output(), config, init, layers)),
      names_(decoder_names(config)),
      logits_(layers.logits) {}

Tensor GptHead::forward(const Tensor& x) { return logits_(ln_f(x), wte); }

void GptHead::members(MemberVisitor& visit) {
  visit.module(names_.norm, *ln_f);
  visit.module(names_.output(), *wte);
}

Gpt::Gpt(const ModelConfig& config, const InitOptions& init,
         const LayerFactory& layers)
    : config(config),
      embedding(config, init, layers),
      ln_f(last_norm(config, init, layers)),
      logits_(layers.logits) {
  const DecoderNames names = decoder_names(config);
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    h.emplace_back(names.block(i), config, init, layers);
  }
  if (!names.head.empty()) lm_head = table(names.head, config, init, layers);
}

Tensor Gpt::forward(const Tensor& tokens) {
  Tensor x = embedding(tokens);
  for (GptBlock& block : h) x = block(x);
  return logits_(ln_f(x), lm_head ? *lm_head : embedding.wte);
}

void Gpt::members(MemberVisitor& visit) {
  const DecoderNames names = decoder_names(config);
  embedding.members(visit);
  for (std::size_t i = 0; i < h.size(); ++i) {
    visit.module(names.block(static_cast<std::int64_t>(i)), h[i]);
  }
  visit.module(names.norm, *ln_f);
  if (lm_head) visit.module(names.head, **lm_head);
}

// --- MLP ---------------------------------------------------------------------

MlpModel::MlpModel(const ModelConfig& config, const InitOptions& init)
    : wte("wte", config.vocab_size, config.n_embd, init, 1.0),
      fc1("fc1", config.n_embd, 4 * config.n_embd, init),
      fc2("fc2", 4 * config.n_embd, config.n_embd, init),
      fc3("fc3", config.n_embd, config.vocab_size, init) {}

Tensor MlpModel::forward(const Tensor& tokens) {
  return fc3(relu(fc2(relu(fc1(wte(tokens))))));
}

void MlpModel::members(MemberVisitor& visit) {
  visit.module("wte", wte);
  visit.module("fc1", fc1);
  visit.module("fc2", fc2);
  visit.module("fc3", fc3);
}

// --- Both --------------------------------------------------------------------

std::unique_ptr<Module> make_model(const ModelConfig& config,
                                   const InitOptions& init) {
  if (config.type == "mlp") return std::make_unique<MlpModel>(config, init);
  if (config.is_image()) return std::make_unique<ResNet>(config, init);
  return std::make_unique<Gpt>(config, init);
}

void set_recompute(Module& model, bool on) {
  for (const NamedModule& entry : model.named_modules()) {
    if (auto* block = dynamic_cast<GptBlock*>(entry.module)) {
      block->recompute = on;
    }
    if (auto* block = dynamic_cast<ResNetBlock*>(entry.module)) {
      block->recompute = on;
    }
  }
}

void note_local_loss(const Tensor& loss) {
  if (loss.is_meta() || loss.numel() != 1) return;
  // Not item(): the host would wait for the device, which takes virtual time.
  if (!std::isfinite(loss.to_vector<double>()[0])) {
    RankContext::current().losses_are_finite = false;
  }
}

Tensor language_loss(const Tensor& logits, const Tensor& targets) {
  const Tensor loss = cross_entropy(logits, targets);
  note_local_loss(loss);
  return loss;
}

}  // namespace shardbook
