#include "chapters/common/models/models.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>

#include "chapters/common/models/resnet.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {

double residual_stddev(const ModelConfig& config) {
  return config.initializer_range /
         std::sqrt(2.0 * static_cast<double>(config.n_layer));
}

// --- GPT ---------------------------------------------------------------------

LayerFactory::LayerFactory() {
  mlp = [](const std::string& name, const ModelConfig& config,
           const InitOptions& init, const LayerFactory& layers) -> AnyModule {
    return {std::make_unique<GptMlp>(name, config, init, layers)};
  };
  linear = [](const std::string& name, std::int64_t in, std::int64_t out,
              double stddev, const InitOptions& init) -> AnyModule {
    auto made = std::make_unique<Linear>();
    made->weight = make_parameter(name + ".weight", {in, out}, stddev, init);
    made->bias = make_constant_parameter({out}, 0, init);
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
  layer_norm = [](const std::string&, std::int64_t width, double eps,
                  const InitOptions& init) -> AnyModule {
    return {std::make_unique<LayerNorm>(width, init, eps)};
  };
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
    : c_attn(layers.linear(name + ".c_attn", config.n_embd, 3 * config.n_embd,
                           config.initializer_range, init)),
      c_proj(layers.linear(name + ".c_proj", config.n_embd, config.n_embd,
                           residual_stddev(config), init)),
      resid_dropout(layers.dropout(config.dropout)),
      heads(config.n_head),
      all_heads(config.n_head),
      attention_dropout(config.dropout),
      attention_(layers.attention) {}

Tensor GptAttention::forward(const Tensor& x) {
  const Tensor qkv = c_attn(x);
  AttentionOptions options;
  options.heads = heads;
  options.dropout = is_training() ? attention_dropout : 0;
  if (heads != all_heads) {
    // Dropout draws for these heads as one device draws for them
    const std::int64_t s = qkv.size(1);
    options.shard = {{qkv.size(0), all_heads, s, s}, {0, first_head, 0, 0}, {}};
  }
  return resid_dropout(c_proj(attention_(qkv, options)));
}

void GptAttention::members(MemberVisitor& visit) {
  visit.module("c_attn", *c_attn);
  visit.module("c_proj", *c_proj);
  visit.module("resid_dropout", *resid_dropout);
}

GptMlp::GptMlp(const std::string& name, const ModelConfig& config,
               const InitOptions& init, const LayerFactory& layers)
    : c_fc(layers.linear(name + ".c_fc", config.n_embd, 4 * config.n_embd,
                         config.initializer_range, init)),
      c_proj(layers.linear(name + ".c_proj", 4 * config.n_embd, config.n_embd,
                           residual_stddev(config), init)),
      resid_dropout(layers.dropout(config.dropout)),
      gelu_form(config.gelu) {}

namespace {

/// The layer as core's Linear; null where a chapter replaces it, or where its
/// hooks must see its input and output.
const Linear* plain_linear(const AnyModule& layer) {
  const Module& module = *layer;
  const bool is_plain = typeid(module) == typeid(Linear) && !module.has_hooks();
  return is_plain ? &layer.as<Linear>() : nullptr;
}

}  // namespace

Tensor GptMlp::forward(const Tensor& x) {
  const Linear *fc = plain_linear(c_fc), *proj = plain_linear(c_proj);
  if (fc == nullptr || proj == nullptr) {
    return resid_dropout(c_proj(gelu(c_fc(x), gelu_form)));
  }
  return resid_dropout(
      gelu_mlp(x, fc->weight, fc->bias, proj->weight, proj->bias, gelu_form));
}

void GptMlp::members(MemberVisitor& visit) {
  visit.module("c_fc", *c_fc);
  visit.module("c_proj", *c_proj);
  visit.module("resid_dropout", *resid_dropout);
}

GptBlock::GptBlock(const std::string& name, const ModelConfig& config,
                   const InitOptions& init, const LayerFactory& layers)
    : ln_1(layers.layer_norm(name + ".ln_1", config.n_embd,
                             config.layer_norm_epsilon, init)),
      ln_2(layers.layer_norm(name + ".ln_2", config.n_embd,
                             config.layer_norm_epsilon, init)),
      attn(name + ".attn", config, init, layers),
      mlp(layers.mlp(name + ".mlp", config, init, layers)) {}

Tensor GptBlock::compute(const Tensor& x) {
  const Tensor y = add(x, attn(ln_1(x)));
  return add(y, mlp(ln_2(y)));
}

Tensor GptBlock::forward(const Tensor& x) {
  if (!recompute) return compute(x);
  return autograd::recompute(
      [this](const Tensors& inputs) { return Tensors{compute(inputs[0])}; },
      {x})[0];
}

void GptBlock::members(MemberVisitor& visit) {
  visit.module("ln_1", *ln_1);
  visit.module("attn", attn);
  visit.module("ln_2", *ln_2);
  visit.module("mlp", *mlp);
}

namespace {

AnyModule token_embedding(const ModelConfig& config, const InitOptions& init,
                          const LayerFactory& layers) {
  return layers.embedding("transformer.wte", config.vocab_size, config.n_embd,
                          config.initializer_range, init);
}

}  // namespace

GptEmbedding::GptEmbedding(const ModelConfig& config, const InitOptions& init,
                           const LayerFactory& layers)
    : wte(token_embedding(config, init, layers)),
      wpe(layers.position_embedding("transformer.wpe", config.n_positions,
                                    config.n_embd, config.initializer_range,
                                    init)),
      embd_dropout(layers.dropout(config.dropout)),
      positions_(layers.positions) {}

Tensor GptEmbedding::forward(const Tensor& tokens) {
  // In two statements: their order decides the order of backward.
  const Tensor token_vectors = wte(tokens);
  return embd_dropout(add(token_vectors, positions_(wpe, tokens)));
}

void GptEmbedding::members(MemberVisitor& visit) {
  visit.module("transformer.wte", *wte);
  visit.module("transformer.wpe", *wpe);
  visit.module("transformer.embd_dropout", *embd_dropout);
}

GptHead::GptHead(const ModelConfig& config, const InitOptions& init,
                 const LayerFactory& layers)
    : ln_f(layers.layer_norm("transformer.ln_f", config.n_embd,
                             config.layer_norm_epsilon, init)),
      wte(token_embedding(config, init, layers)),
      logits_(layers.logits) {}

Tensor GptHead::forward(const Tensor& x) { return logits_(ln_f(x), wte); }

void GptHead::members(MemberVisitor& visit) {
  visit.module("transformer.ln_f", *ln_f);
  visit.module("transformer.wte", *wte);
}

Gpt::Gpt(const ModelConfig& config, const InitOptions& init,
         const LayerFactory& layers)
    : config(config),
      embedding(config, init, layers),
      ln_f(layers.layer_norm("transformer.ln_f", config.n_embd,
                             config.layer_norm_epsilon, init)),
      logits_(layers.logits) {
  for (std::int64_t i = 0; i < config.n_layer; ++i) {
    h.emplace_back("transformer.h." + std::to_string(i), config, init, layers);
  }
}

Tensor Gpt::forward(const Tensor& tokens) {
  Tensor x = embedding(tokens);
  for (GptBlock& block : h) x = block(x);
  return logits_(ln_f(x), embedding.wte);
}

void Gpt::members(MemberVisitor& visit) {
  embedding.members(visit);
  for (std::size_t i = 0; i < h.size(); ++i) {
    visit.module("transformer.h." + std::to_string(i), h[i]);
  }
  visit.module("transformer.ln_f", *ln_f);
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
  SB_CHECK(!config.is_llama(), "a ", config.type, " has no layers here");
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
