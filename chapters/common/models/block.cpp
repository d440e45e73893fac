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

BlockTable llama(const ModelConfig& c) {
  const LlamaConfig& l = c.llama;
  const std::int64_t h = c.n_embd, f = l.intermediate_size;
  const std::int64_t q = c.n_head * l.head_dim, kv = l.kv_heads * l.head_dim;
  const double stddev = c.initializer_range;
  BlockTable block;
  block.attention_module = "self_attn";
  block.mlp_module = "mlp";
  block.norm_1 = norm("input_layernorm", PartKind::kRmsNorm, h);
  const Columns keys{kv, l.kv_heads};
  block.qkv = product("self_attn.qkv_proj", h, {{q, c.n_head}, keys, keys},
                      l.qkv_bias, Cut::kColumns, stddev);
  if (l.qk_norm) {
    block.head_norms = {
        norm("self_attn.q_norm", PartKind::kRmsNorm, q, c.n_head),
        norm("self_attn.k_norm", PartKind::kRmsNorm, kv, l.kv_heads)};
  }
  block.attention = attention_of(block.qkv, c.n_head);
  block.proj = product("self_attn.o_proj", q, h, l.o_bias, Cut::kRows, stddev);
  block.norm_2 = norm("post_attention_layernorm", PartKind::kRmsNorm, h);
  block.up = product("mlp.gate_up_proj", h, {{f, f}, {f, f}}, l.mlp_bias,
                     Cut::kColumns, stddev);
  block.gate = function(PartKind::kSwiglu, 2 * f, f);
  block.down = product("mlp.down_proj", f, h, l.mlp_bias, Cut::kRows, stddev);
  return block;
}

}  // namespace

double BlockPart::out_on(double t) const {
  if (cut != Cut::kColumns) return static_cast<double>(out);
  return columns.empty() ? static_cast<double>(out) / t : held_on(columns, t);
}

double BlockPart::kept(double t) const {
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
  return (kind == PartKind::kAttention ? 2.5 : 2) * operations(seq, t);
}

double BlockPart::deferred(double t) const {
  if (kind != PartKind::kProduct) return 0;
  return kept(t) + static_cast<double>(chosen) * out_on(t);
}

std::vector<BlockPart> BlockTable::parts() const {
  std::vector<BlockPart> all = {norm_1, qkv};
  all.insert(all.end(), head_norms.begin(), head_norms.end());
  all.insert(all.end(), {attention, proj, norm_2});
  all.insert(all.end(), router.begin(), router.end());
  all.insert(all.end(), {up, gate, down});
  return all;
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
  return table;
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
