#include "chapters/common/models/block.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>

#include "chapters/common/models/models.h"
#include "core/check.h"

namespace shardbook {
namespace {

BlockPart norm(const std::string& name, PartKind kind, std::int64_t width,
               std::int64_t heads = 1) {
  BlockPart part;
  part.name = name;
  part.kind = kind;
  part.in = part.out = width;
  part.bias = kind == PartKind::kLayerNorm;
  part.heads = heads;
  return part;
}

/// Several `columns` lie side by side.
BlockPart product(const std::string& name, std::int64_t in,
                  const std::vector<Columns>& columns, bool bias, Cut cut,
                  double stddev) {
  BlockPart part;
  part.name = name;
  part.in = in;
  for (const Columns& each : columns) part.out += each.width;
  if (columns.size() > 1) part.columns = columns;
  part.bias = bias;
  part.cut = cut;
  part.stddev = stddev;
  return part;
}

BlockPart product(const std::string& name, std::int64_t in, std::int64_t out,
                  bool bias, Cut cut, double stddev) {
  return product(name, in, {{out, out}}, bias, cut, stddev);
}

BlockPart function(PartKind kind, std::int64_t in, std::int64_t out) {
  BlockPart part;
  part.kind = kind;
  part.in = in;
  part.out = out;
  return part;
}

BlockPart attention_of(const BlockPart& qkv, std::int64_t heads) {
  BlockPart part =
      function(PartKind::kAttention, qkv.out, qkv.columns[0].width);
  part.heads = heads;
  part.columns = qkv.columns;
  return part;
}

/// Of all these columns, those that each of t ranks holds.
double held_on(const std::vector<Columns>& columns, double t) {
  double held = 0;
  for (const Columns& each : columns) {
    held += static_cast<double>(each.width) /
            std::min(static_cast<double>(each.parts), t);
  }
  return held;
}

/// up, gate and down of a gated MLP.
std::vector<BlockPart> gated_mlp(const std::string& name, std::int64_t h,
                                 std::int64_t f, bool bias, double stddev) {
  return {product(name + ".gate_up_proj", h, {{f, f}, {f, f}}, bias,
                  Cut::kColumns, stddev),
          function(PartKind::kSwiglu, 2 * f, f),
          product(name + ".down_proj", f, h, bias, Cut::kRows, stddev)};
}

BlockTable gpt2(const ModelConfig& c) {
  const std::int64_t h = c.n_embd;
  const double last = residual_stddev(c);
  BlockTable block;
  block.attention_module = "attn";
  block.mlp_module = "mlp";
  block.norm_1 = norm("ln_1", PartKind::kLayerNorm, h);
  const Columns heads{h, c.n_head};
  block.qkv = product("attn.c_attn", h, {heads, heads, heads}, true,
                      Cut::kColumns, c.initializer_range);
  block.attention = attention_of(block.qkv, c.n_head);
  block.proj = product("attn.c_proj", h, h, true, Cut::kRows, last);
  block.norm_2 = norm("ln_2", PartKind::kLayerNorm, h);
  block.up =
      product("mlp.c_fc", h, 4 * h, true, Cut::kColumns, c.initializer_range);
  block.gate = function(PartKind::kGelu, 4 * h, 4 * h);
  block.down = product("mlp.c_proj", 4 * h, h, true, Cut::kRows, last);
  return block;
}

void set_mlp(BlockTable& block, const std::vector<BlockPart>& mlp) {
  block.up = mlp[0];
  block.gate = mlp[1];
  block.down = mlp[2];
}

BlockTable llama(const ModelConfig& c) {
  const LlamaConfig& l = c.llama;
  const std::int64_t h = c.n_embd;
  const std::int64_t q = c.n_head * l.head_dim, kv = l.kv_heads * l.head_dim;
  const double stddev = c.initializer_range;
  BlockTable block;
  block.attention_module = "self_attn";
  block.mlp_module = "mlp";
  block.norm_1 = norm("input_layernorm", PartKind::kRmsNorm, h);
  const Columns keys{kv, l.kv_heads};
  if (l.is_latent()) {
    block.latent = latent_parts({h, c.n_head, l.q_rank, l.kv_rank, l.rope_dim,
                                 l.head_dim - l.rope_dim, l.value_dim,
                                 l.qkv_bias, stddev});
    block.attention = block.latent.back();
    block.latent.pop_back();
  } else {
    block.qkv = product("self_attn.qkv_proj", h, {{q, c.n_head}, keys, keys},
                        l.qkv_bias, Cut::kColumns, stddev);
    block.attention = attention_of(block.qkv, c.n_head);
  }
  if (l.qk_norm) {
    block.head_norms = {
        norm("self_attn.q_norm", PartKind::kRmsNorm, q, c.n_head),
        norm("self_attn.k_norm", PartKind::kRmsNorm, kv, l.kv_heads)};
  }
  block.proj = product("self_attn.o_proj", block.attention.out, h, l.o_bias,
                       Cut::kRows, stddev);
  block.norm_2 = norm("post_attention_layernorm", PartKind::kRmsNorm, h);
  set_mlp(block, gated_mlp("mlp", h, l.intermediate_size, l.mlp_bias, stddev));
  return block;
}

}  // namespace

double BlockPart::out_on(double t) const {
  if (cut != Cut::kColumns) return static_cast<double>(out);
  return columns.empty() ? static_cast<double>(out) / t : held_on(columns, t);
}

double BlockPart::kept(double t) const {
  if (shares_input) return 0;
  if (kind == PartKind::kAttention) return held_on(columns, t);
  if (is_norm()) t = std::min(t, static_cast<double>(heads));
  const bool is_cut = kind != PartKind::kProduct || cut == Cut::kRows;
  return static_cast<double>(in * chosen) / (is_cut ? t : 1);
}

double BlockPart::parameters(double t) const {
  const double wide = out_on(t);
  if (is_norm()) return wide / static_cast<double>(heads) * (bias ? 2 : 1);
  if (kind == PartKind::kAttention && has_sinks) {
    return static_cast<double>(heads) / t;
  }
  if (kind != PartKind::kProduct && kind != PartKind::kTable) return 0;
  return static_cast<double>(experts * in) * wide /
             (cut == Cut::kRows ? t : 1) +
         (bias ? static_cast<double>(experts) * wide : 0);
}

double BlockPart::statistics(double t) const {
  if (kind == PartKind::kLayerNorm) return 2;
  if (kind == PartKind::kRmsNorm || kind == PartKind::kAttention) {
    return static_cast<double>(heads) / std::min(t, static_cast<double>(heads));
  }
  return 0;
}

double BlockPart::seen(double seq) const {
  const double all = (seq + 1) / 2;
  const auto most = static_cast<double>(window);
  if (window == 0 || most >= seq) return all;
  // The first `most` tokens see those before them, the others `most` each
  if (!in_chunks) return (most * (most + 1) / 2 + (seq - most) * most) / seq;
  const double rest = std::fmod(seq, most);
  return ((seq - rest) * (most + 1) + rest * (rest + 1)) / 2 / seq;
}

double BlockPart::operations(double seq, double t) const {
  if (kind == PartKind::kProduct) {
    return 2 * static_cast<double>(chosen * in) * out_on(t) /
           (cut == Cut::kRows ? t : 1);
  }
  if (kind != PartKind::kAttention) return 0;
  // Scores are as wide as a query, and sums as wide as values
  return 2 * seen(seq) * static_cast<double>(columns[0].width + out) / t;
}

double BlockPart::backward_operations(double seq, double t) const {
  if (kind != PartKind::kAttention) return 2 * operations(seq, t);
  // Scores, gradients of queries and keys; of values and of their weights
  return 2 * seen(seq) * static_cast<double>(3 * columns[0].width + 2 * out) /
         t;
}

double BlockPart::deferred(double t) const {
  if (kind != PartKind::kProduct) return 0;
  return kept(t) + static_cast<double>(chosen) * out_on(t);
}

std::vector<BlockPart> BlockTable::parts() const {
  std::vector<BlockPart> all = {norm_1};
  if (latent.empty()) all.push_back(qkv);
  all.insert(all.end(), latent.begin(), latent.end());
  all.insert(all.end(), head_norms.begin(), head_norms.end());
  all.insert(all.end(), {attention, proj, norm_2});
  all.insert(all.end(), router.begin(), router.end());
  all.insert(all.end(), {up, gate, down});
  all.insert(all.end(), shared.begin(), shared.end());
  return all;
}

BlockTable BlockTable::of_shared() const {
  BlockTable mlp = *this;
  set_mlp(mlp, shared);
  return mlp;
}

std::vector<BlockPart> latent_parts(const LatentSizes& z) {
  const std::string name = "self_attn.";
  const std::int64_t q = z.heads * (z.rope + z.nope), a = z.heads;
  const Columns rope{a * z.rope, a}, nope{a * z.nope, a},
      values{a * z.value, a};
  const auto from_x = [&](const char* leaf, std::int64_t out) {
    return product(name + leaf, z.hidden, out, z.bias, Cut::kWhole, z.stddev);
  };
  const auto by_heads = [&](const char* leaf, std::int64_t in,
                            const std::vector<Columns>& columns) {
    return product(name + leaf, in, columns, false, Cut::kColumns, z.stddev);
  };
  std::vector<BlockPart> parts;
  if (z.q_rank > 0) {
    parts = {from_x("q_a_proj", z.q_rank),
             norm(name + "q_a_layernorm", PartKind::kRmsNorm, z.q_rank),
             by_heads("q_b_proj", z.q_rank, {rope, nope})};
  } else {
    parts = {by_heads("q_proj", z.hidden, {rope, nope})};
  }
  parts.push_back(from_x("kv_a_proj_with_mqa", z.rope + z.kv_rank));
  parts.back().shares_input = true;
  parts.push_back(norm(name + "kv_a_layernorm", PartKind::kRmsNorm, z.kv_rank));
  parts.push_back(by_heads("kv_b_proj", z.kv_rank, {nope, values}));
  BlockPart attention =
      function(PartKind::kAttention, 2 * q + values.width, values.width);
  attention.heads = a;
  attention.columns = {{q, a}, {q, a}, values};
  parts.push_back(attention);
  return parts;
}

BlockTable block_table(const ModelConfig& config) {
  return config.is_llama() ? llama(config) : gpt2(config);
}

BlockTable block_table(const ModelConfig& config, std::int64_t block) {
  BlockTable table = block_table(config);
  if (!config.llama.has_experts_in(block)) return table;
  const LlamaConfig& l = config.llama;
  const std::int64_t h = config.n_embd, f = l.moe_intermediate_size;
  const double stddev = config.initializer_range;
  table.router = {
      product("mlp.gate", h, l.num_experts, false, Cut::kWhole, stddev)};
  table.up =
      product("mlp.experts.gate_up_proj", h, 2 * f, false, Cut::kWhole, stddev);
  table.gate = function(PartKind::kSwiglu, 2 * f, f);
  table.down =
      product("mlp.experts.down_proj", f, h, false, Cut::kWhole, stddev);
  for (BlockPart* part : {&table.up, &table.gate, &table.down}) {
    part->experts = l.num_experts;
    part->chosen = l.experts_per_token;
  }
  if (config.llama.has_shared_expert_in(block)) {
    table.shared = shared_expert_parts(config);
  }
  return table;
}

std::vector<BlockPart> shared_expert_parts(const ModelConfig& config) {
  const LlamaConfig& l = config.llama;
  std::vector<BlockPart> parts =
      gated_mlp("mlp.shared_experts", config.n_embd, l.shared_intermediate_size,
                l.mlp_bias, config.initializer_range);
  parts[0].shares_input = true;  // the router keeps it
  return parts;
}

std::int64_t block_of(const ModelConfig& config, const std::string& name) {
  const std::string blocks = decoder_names(config).blocks + ".";
  const std::size_t begin = name.rfind(blocks, 0) == 0 ? blocks.size() : 0;
  std::int64_t block = -1;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + begin, end, block);
  SB_CHECK(begin > 0 && error == std::errc() && (rest == end || *rest == '.') &&
               block >= 0 && block < config.n_layer,
           "'", name, "': a ", config.type, " with ", config.n_layer,
           " blocks has no such one");
  return block;
}

DecoderNames decoder_names(const ModelConfig& config) {
  if (!config.is_llama()) {
    return {"transformer.wte", "transformer.wpe", "transformer.h",
            "transformer.ln_f", ""};
  }
  return {"model.embed_tokens", "", "model.layers", "model.norm",
          config.llama.tied ? "" : "lm_head"};
}

}  // namespace shardbook
